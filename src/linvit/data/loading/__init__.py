"""How samples reach the training process: samplers, loaders, the seeds of samples."""
