"""Files, text, signals and properties of the machine, behind functions that do not need torch."""
