"""Looking at the attention of a run: ranks and other numbers of its matrices, and its maps."""
