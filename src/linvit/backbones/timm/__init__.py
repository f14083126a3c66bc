"""linvit and timm: timm's models with any attention, and linvit's backbones in timm's registry."""

from linvit.backbones.timm.model import timm_backbone

__all__ = ["timm_backbone"]
