"""How samples reach the training process: samplers, the seeds of samples, shared memory."""
