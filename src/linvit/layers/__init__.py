"""The layers of backbones: attention layers, feed-forward layers, patch embedding."""
