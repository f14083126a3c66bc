"""The verbs fit, validate, test and predict: one LightningCLI and what it prints, reads and writes."""
