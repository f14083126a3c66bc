"""What a run of semantic segmentation shows: scores of the classes, pictures, and predicted masks as files."""
