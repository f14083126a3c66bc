"""The contracts as functions that the author of a mechanism or of a backbone calls, and as cases for their tests."""

from linvit.testing.attention.check import check_attention
from linvit.testing.backbone.check import check_backbone
from linvit.testing.parametrize import parametrize_with_checks
from linvit.testing.report import Line, Report, Verdict

__all__ = ["Line", "Report", "Verdict", "check_attention", "check_backbone", "parametrize_with_checks"]
