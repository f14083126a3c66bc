"""The contracts as functions that the author of a mechanism or of a backbone calls."""

from linvit.testing.attention.check import check_attention
from linvit.testing.backbone.check import check_backbone
from linvit.testing.report import Line, Report, Verdict

__all__ = ["Line", "Report", "Verdict", "check_attention", "check_backbone"]
