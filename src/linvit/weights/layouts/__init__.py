"""Parameter names of the official checkpoints, one file per family."""
