"""Files, text, signals and the machine: the operating system, behind functions that need no torch."""
