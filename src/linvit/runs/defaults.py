"""The task and the data that `linvit VERB --help` explains if the command line names no others."""

TASK = "linvit.tasks.ClassificationTask"
DATA = "linvit.data.ClassificationData"
