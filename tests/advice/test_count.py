"""Counted bounds against the formula of a plain ViT."""

import pytest
import timm
import torch

import linvit
from linvit.advice.count import count, square_root_steps
from linvit.advice.subject import CEILING


def plain_vit(side, dim=192, depth=3):
    options = {"img_size": side, "patch_size": 16, "embed_dim": dim, "depth": depth, "num_heads": 3, "num_classes": 10}
    return timm.models.VisionTransformer(**options)


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("side", [64, 224])
def test_blocks_of_a_plain_vit_have_one_plus_n_over_six_c(side, replaced):
    dim, depth, patches = 192, 3, (side // 16) ** 2
    with torch.device("meta"):
        network = plain_vit(side)
        found = count(linvit.replace_attention(network, CEILING) if replaced else network, (side, side))
    tokens = patches + 1
    ends = 2 * patches * 16 * 16 * 3 * dim + 2 * dim * 10  # patch embedding and classifier
    assert found.cores == depth * 4 * tokens**2 * dim
    assert found.others == depth * 24 * tokens * dim**2 + ends
    assert 1 + found.cores / (found.others - ends) == pytest.approx(1 + tokens / (6 * dim), abs=1e-12)
    assert found[2:] == (tokens, depth, 0 if replaced else depth)


@pytest.mark.parametrize(("name", "bound"), [("pvt_v2_b0", 1.07), ("swin_tiny_patch4_window7_224", 1.03)])
def test_pyramids(name, bound):
    with torch.device("meta"):
        found = count(linvit.replace_attention(timm.create_model(name), CEILING), (224, 224))
    assert found.bound == pytest.approx(bound, abs=0.005)


def test_steps_of_sizes():
    assert square_root_steps(224, 1024, 16) == [224, 320, 448, 640, 896]
    assert square_root_steps(518, 1024, 14) == [518, 728]
    assert square_root_steps(1024, 1024, 16) == [1024]
