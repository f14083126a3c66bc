"""timm's NaFlexVit: in a batch of images of several sizes each gets what it gets alone, with any mechanism."""

from typing import Any

import pytest
import timm
import torch
from timm.models.naflexvit import batch_patchify
from torch import Tensor, nn
from torch.nn import functional as F

from linvit import Grid, UserError, create_attention, replace_attention
from linvit.registry import attentions
from tests.backbones.timm.test_table import PAGE
from tests.helpers import assert_near, own_names, perturb

SIZES = ((64, 48), (32, 80), (64, 64))
LENGTH = 20
PREFIX = {"class_token": True, "reg_tokens": 1, "global_pool": "token"}
MODELS: dict[str, dict[str, Any]] = {"prefix": PREFIX, "axial": {"rope_type": "axial"}, "mixed": {"rope_type": "mixed"}}


def model(attention: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    small = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5, **options}
    built = perturb(timm.create_model("naflexvit_base_patch16_gap", **small).double().eval(), scale=0.3)
    if attention is not None:
        replace_attention(built, attention, 64)
        perturb(built, scale=0.1)
    return built


def images() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, *size, dtype=torch.float64) for size in SIZES]


def batch(pictures: list[Tensor]) -> dict[str, Tensor]:
    """As timm's collator makes it, but that what fills up is not 0."""
    found: dict[str, list[Tensor]] = {"patches": [], "patch_coord": [], "patch_valid": []}
    for picture in pictures:
        patches, (rows, columns) = batch_patchify(picture[None], (16, 16))
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        missing = (0, 0, 0, LENGTH - len(places))
        found["patches"].append(F.pad(patches[0], missing, value=3.0))
        found["patch_coord"].append(F.pad(places, missing))
        found["patch_valid"].append(torch.arange(LENGTH) < len(places))
    return {name: torch.stack(parts) for name, parts in found.items()}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("attention", ["linear", "hydra", "taylor", "focused", ["softmax", None]])
def test_each_image_gets_what_it_gets_alone(attention: Any, kind: str) -> None:
    network, pictures = model(attention, **MODELS[kind]), images()
    tolerance = 1e-6 if kind == "axial" else 1e-11  # timm makes these tables in float32
    for picture in pictures:
        picture.requires_grad_()
    together = network(batch(pictures))
    alone = torch.cat([network(picture[None]) for picture in pictures])
    assert_near(together, alone, tolerance)
    found = torch.autograd.grad(together.square().sum(), pictures)
    for got, want in zip(found, torch.autograd.grad(alone.square().sum(), pictures), strict=True):
        assert_near(got, want, tolerance)


@pytest.mark.parametrize("kind", MODELS)
def test_softmax_changes_nothing(kind: str) -> None:
    theirs, ours = model(**MODELS[kind]), model(**MODELS[kind])
    replace_attention(ours, "softmax", 64)
    assert_near(ours(batch(images())), theirs(batch(images())), 1e-12)


def test_under_patch_dropout_only_a_mask_leaves_tokens_out() -> None:
    masked, whole = (model(name, patch_drop_rate=0.25).train() for name in ("linear", "taylor"))
    assert masked(batch(images())).isfinite().all()
    with pytest.raises(UserError, match="TaylorAttention cannot leave tokens out by a mask: it needs whole images"):
        whole(batch(images()))
    given = batch(images())
    given["attn_mask"] = F.pad(given["patch_valid"], (4, 0), value=True)[:, None, None]
    assert_near(whole.eval()(given), whole(batch(images())), 1e-12)
    given["attn_mask"][0, ..., 5] = False
    with pytest.raises(UserError, match="it needs whole images"):
        whole(given)


def test_the_page_names_those_that_mask() -> None:
    (line,) = (line for line in PAGE.read_text().splitlines() if "by a mask of the keys" in line)
    built = {name: create_attention(name, dim=8, num_heads=2, grid=Grid((4, 4))) for name in own_names(attentions)}
    masking = {name for name in built if built[name].takes_mask and built[name].facts.equivariant}
    assert {name for name in built if f"`{name}`" in line} == masking
