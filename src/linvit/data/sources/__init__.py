"""Where samples come from: splits, folders, shards, streams, columns, labels, unreadable images."""
