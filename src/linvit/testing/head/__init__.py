"""The contracts of the heads of semantic segmentation and of detection."""
