"""Backbones: timm's contract, any attention inside. Importing this registers their names with timm."""

from linvit.backbones.timm.registration import register_with_timm

register_with_timm()
