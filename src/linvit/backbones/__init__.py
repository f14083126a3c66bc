"""Backbones: timm's contract, any attention inside. Importing this registers their names with timm."""

from linvit.backbones.stage import Stage, pyramid_info, specs_and_rates, stage_grids
from linvit.backbones.timm.registration import register_with_timm

__all__ = ["Stage", "pyramid_info", "specs_and_rates", "stage_grids"]

register_with_timm()
