"""Tiny models of transformers with random weights, one per family that takes another attention."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")  # an extra, which CI does not install

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
MODELS = {
    "ViT": ("ViTModel", "ViTConfig", {}),
    "DeiT": ("DeiTModel", "DeiTConfig", {}),
    "ViT-MSN": ("ViTMSNModel", "ViTMSNConfig", {}),
    "DINOv2": ("Dinov2Model", "Dinov2Config", {}),
    "DINOv2 with registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"num_register_tokens": 3}),
    "DINOv3 ViT": ("DINOv3ViTModel", "DINOv3ViTConfig", {"num_register_tokens": 3}),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", {}),
    "CLIP": ("CLIPVisionModel", "CLIPVisionConfig", {}),
    "MetaCLIP 2": ("MetaClip2VisionModel", "MetaClip2VisionConfig", {}),
    "BEiT": ("BeitModel", "BeitConfig", {"use_relative_position_bias": True}),
    "I-JEPA": ("IJepaModel", "IJepaConfig", {}),
    "ViTMAE": ("ViTMAEModel", "ViTMAEConfig", {"mask_ratio": 0.5}),
    "VideoMAE": ("VideoMAEModel", "VideoMAEConfig", {"num_frames": 4}),
}
"""Class of the model, class of its config and options of that, by the name of the family."""
RESIZED = ("ViT", "DeiT", "ViT-MSN", "SigLIP", "CLIP", "MetaCLIP 2", "BEiT", "I-JEPA", "ViTMAE")
"""Families that interpolate their positions if they are asked to."""


def tiny(family: str, **options: Any) -> nn.Module:
    """A model of a family, random and in evaluation mode; biases and norms are not at their initial values."""
    model, config, own = MODELS[family]
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **own, **options}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.eval()


def inputs_of(family: str, size: tuple[int, int] = (32, 32)) -> dict[str, Any]:
    """What a model of a family is called with, for two images of a size, or two videos."""
    if family == "VideoMAE":
        return {"pixel_values": torch.randn(2, 4, 3, *size)}
    options: dict[str, Any] = {"pixel_values": torch.randn(2, 3, *size)}
    if family == "ViTMAE":
        options["noise"] = torch.rand(2, size[0] * size[1] // 64)
    if size != (32, 32) and family in RESIZED:
        options["interpolate_pos_encoding"] = True
    return options


def tokens(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The last tokens (B, N, C)."""
    found: Tensor = model(**inputs).last_hidden_state
    return found
