"""What a run is: its configuration, its folder, its checkpoints, how it starts, resumes and ends."""
