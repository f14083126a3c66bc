"""Where samples come from: splits, folders, shards, streams, columns, labels, unreadable images."""

import datasets

# It counts its uses at amazonaws.com, of local files, too. What is read from the hub is counted by the hub.
datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
