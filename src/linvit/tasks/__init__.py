"""Tasks: what is trained and how it is scored."""

from linvit.tasks.base import Task
from linvit.tasks.classification import ClassificationTask

__all__ = ["ClassificationTask", "Task"]
