"""What a run of detection shows: scores of the classes, curves, pictures, and detections as files."""
