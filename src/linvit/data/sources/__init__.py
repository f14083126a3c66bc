"""Sources of samples: splits, folders, shards, streams, columns, labels, unreadable images."""

import datasets

# `datasets` reports each use to amazonaws.com, even of local files. The hub counts its own downloads.
datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
