"""RAVLT, MAViT, NaLaFormer and PolaFormer++ equal their reference codes, which share one network."""

from typing import Any

import pytest
import torch
from torch import nn

import linvit
from linvit.backbones.ravlt import RAVLT
from linvit.tasks.parameter_groups import parameter_groups

SIZES = {"embed_dims": (16, 32, 48, 64), "num_heads": (2, 2, 3, 4), "depths": (1, 1, 2, 1)}
KINDS = {"rala": "ravlt_t", "mala": "mavit_t", "nala": "nalaformer_xt", "pola_pp": "pola_pp_b0"}


def small(name: str = "ravlt_t", **options: Any) -> RAVLT:
    """A small model in evaluation mode."""
    torch.manual_seed(0)
    model = linvit.create_backbone(name, **{**SIZES, "head_width": 24, "num_classes": 7, "img_size": 64, **options})
    assert isinstance(model, RAVLT)
    return model.eval()


def test_initial_values() -> None:
    """Convolutions begin as linear layers do; these are torch's in the codes of NaLaFormer and PolaFormer++."""
    for name in ("ravlt_t", "nalaformer_xt"):
        model = small(name, layer_scale=(1, 1, 0.5, 1e-6))
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d):
                assert layer.weight.abs().max() < 0.1
                assert not layer.bias.any()
        block = model.stages[3].blocks[0]
        torchs = name == "nalaformer_xt"
        assert block.attn.qkv.weight.std().item() == pytest.approx(64**-0.5 / 3**0.5 if torchs else 0.02, rel=0.1)
        assert block.attn.gate.bias.any() == torchs
        assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.1)
        gammas = [stage.blocks[0].scale2.gamma.unique().item() for stage in model.stages]
        assert gammas == pytest.approx([1, 1, 0.5, 1e-6])


def test_factors_on_the_branches_are_decayed_as_in_the_reference() -> None:
    model = small()
    decayed = {id(p) for group in parameter_groups(model, 1.0, 0.05) if group["weight_decay"] for p in group["params"]}
    gammas = [parameter for name, parameter in model.named_parameters() if name.endswith("gamma")]
    assert len(gammas) == 10
    assert all(id(gamma) in decayed for gamma in gammas)


def test_features_for_dense_tasks_are_normed_without_the_head() -> None:
    features = linvit.create_segmentor({"name": "ravlt_t", **SIZES}, "semantic_fpn", num_classes=3).backbone
    assert [norm.normalized_shape for norm in features.feature_norms] == [(16,), (32,), (48,), (64,)]
    assert not [name for name, _ in features.named_parameters() if name.startswith(("head", "final_proj"))]
