"""Pictures of dense prediction, which segmentation and detection share."""
