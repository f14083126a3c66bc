"""timm's vision transformers become students, and are trained for some steps."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

from linvit import Distillation, linearize
from linvit.linearization.distillation import Matching
from tests.backbones.timm.hosts import HOSTS

VIT: dict[str, Any] = {"img_size": 48, "depth": 2, "embed_dim": 32, "num_heads": 2}
PYRAMID: dict[str, Any] = {"embed_dims": (8, 8, 16, 16), "num_heads": (1, 1, 2, 2), "depths": (1, 1, 1, 1)}
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": VIT,
    "deit3_small_patch16_224": VIT,
    "beit_base_patch16_224": VIT,
    "vit_small_patch14_dinov2": {**VIT, "img_size": 42},
    "vit_small_patch14_reg4_dinov2": {**VIT, "img_size": 42},
    "vit_base_patch16_siglip_224": {**VIT, "num_classes": 0},
    "pvt_v2_b0": PYRAMID,
    "swin_tiny_patch4_window7_224": {"img_size": 56, "embed_dim": 12, "depths": (2, 2), "num_heads": (1, 2)},
}
BOTH = [(name, attention) for name in MODELS for attention in ("focused", "inline")]
ROTARY: dict[str, dict[str, Any]] = {
    "vit_small_patch16_dinov3": {**VIT, "img_size": 64},
    "eva02_tiny_patch14_224": {**VIT, "img_size": 56},
    "vit_small_patch16_rope_mixed_224": {**VIT, "img_size": 64},
}
MODELS |= ROTARY | {name: host.options for name, host in HOSTS.items()}
MATCHED = Matching(block_weight=1.0, feature_weight=1.0, logit_weight=1.0)


def built(name: str) -> tuple[nn.Module, int]:
    """A small model, and the side of its images."""
    torch.manual_seed(0)
    side = HOSTS[name].side if name in HOSTS else MODELS[name].get("img_size", 64)
    return timm.create_model(name, **{"num_classes": 5, **MODELS[name]}), side


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("cait")])  # which mixes heads
def test_softmax_is_no_distance_from_itself(name: str) -> None:
    teacher, side = built(name)
    teacher, images = teacher.double(), torch.randn(2, 3, side, side, dtype=torch.float64)
    student = linearize(teacher, "softmax", side).eval()
    found = Distillation(teacher, student, MATCHED).distances(images)
    assert found.keys() == MATCHED.weights.keys()
    assert max(error for errors in found.values() for error in errors.values()) < 1e-15
    torch.testing.assert_close(student(images), teacher(images))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), BOTH + [(name, "focused") for name in (*ROTARY, *HOSTS)])
def test_they_are_converted_and_come_nearer(name: str, attention: str) -> None:
    teacher, side = built(name)
    before = {key: value.clone() for key, value in teacher.state_dict().items()}
    student = linearize(teacher, attention, side).train()
    distillation = Distillation(teacher, student, MATCHED)
    optimizer = torch.optim.AdamW(student.parameters(), 1e-4)
    losses = []
    for _ in range(3):
        student(torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0)))
        loss = distillation.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert all(torch.equal(before[key], value) for key, value in teacher.state_dict().items())
