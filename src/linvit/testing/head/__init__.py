"""The contract of the heads of semantic segmentation."""
