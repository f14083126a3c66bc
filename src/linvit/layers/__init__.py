"""Layers of backbones: attention layers, feed-forward layers, patch embedding."""

from linvit.layers.block import Block
from linvit.layers.mlp import Mlp
from linvit.layers.patch_embed import PatchEmbed

__all__ = ["Block", "Mlp", "PatchEmbed"]
