"""Sources of samples: splits, folders, shards, streams, columns, labels, unreadable images."""
