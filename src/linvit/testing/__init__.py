"""Tests of the contracts, for the authors of mechanisms and backbones: as functions, and as cases of pytest."""

from linvit.testing.attention.check import check_attention
from linvit.testing.backbone.check import check_backbone
from linvit.testing.parametrize import parametrize_with_checks
from linvit.testing.report import Line, Report, Verdict

__all__ = ["Line", "Report", "Verdict", "check_attention", "check_backbone", "parametrize_with_checks"]
