"""The contracts as functions that the author of a mechanism calls."""

from linvit.testing.attention import check_attention
from linvit.testing.report import Line, Report, Verdict

__all__ = ["Line", "Report", "Verdict", "check_attention"]
