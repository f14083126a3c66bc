"""Official checkpoints in our backbones: names, shapes, and files that cannot be trusted."""
