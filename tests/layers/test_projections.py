"""Rows of projections by letter, and output projections of wider and narrower heads."""

import pytest
import torch
from torch import nn

from linvit import AttentionLayer, Grid
from linvit.layers.projections import copy_heads, joined, keep_weights, rows_of, widened
from linvit.layers.stripes import StripeAttention
from tests.helpers import randn


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduced", [1, 2])
def test_rows_are_views_of_what_each_letter_projects(bias: bool, reduced: int) -> None:
    spec = {"name": "efficient", "key_ratio": 0.5}
    layer = AttentionLayer(24, 3, Grid((4, 4)), attention=spec, qkv_bias=bias, sr_ratio=reduced)
    rows = rows_of(layer)
    assert {letter: len(weight) for letter, (weight, _) in rows.items()} == {"q": 12, "k": 12, "v": 24}
    whole = layer.qkv.weight if reduced == 1 else torch.cat([layer.q.weight, layer.kv.weight])
    assert torch.equal(torch.cat([weight for weight, _ in rows.values()]), whole)
    assert all((rows[letter][1] is not None) == bias for letter in "qkv")
    fused = layer.qkv if reduced == 1 else layer.kv
    fused.weight.zero_()
    assert not rows["v"][0].any()
    again = joined(rows, "kv")
    assert again.weight.shape == (36, 24)
    assert (again.bias is not None) == bias


def test_rows_of_two_branches_lie_together() -> None:
    layer = StripeAttention(24, 4, Grid((6, 6)), 2)
    x = randn(1, 36, 24, dtype=torch.float32)
    weight, bias = rows_of(layer)["k"]
    want = torch.cat(layer.qkv(x).split(layer.widths, -1)[2:4], -1)
    torch.testing.assert_close(nn.functional.linear(x, weight, bias), want)


@pytest.mark.parametrize("width", [4, 8, 12])
def test_the_first_channels_of_each_head_are_kept(width: int) -> None:
    proj = nn.Linear(3 * 8, 5)
    new = nn.Linear(3 * width, 5)
    with torch.no_grad():
        copy_heads(proj.weight, new.weight, 3)
    kept = min(8, width)
    for head in range(3):
        into = new.weight[:, head * width : head * width + kept]
        assert torch.equal(into, proj.weight[:, head * 8 : head * 8 + kept])
    assert widened(proj, 24, 3) is proj


@torch.no_grad()
@pytest.mark.parametrize("build", [AttentionLayer, StripeAttention], ids=["whole", "two branches"])
def test_heads_that_a_mechanism_adds_lie_behind_the_others(build: type[nn.Module]) -> None:
    """Softmax's columns go to the same heads of vittt, whose own have initial values, and come back from there."""
    args = (2,) if build is StripeAttention else ()
    old = build(24, 6, Grid((6, 6)), *args)
    new, back = old.like(attention="vittt"), old.like(attention="softmax")
    keep_weights(old, new)
    keep_weights(new, back)
    branches = 1 if build is AttentionLayer else 2
    assert new.proj.weight.shape == (24, 24 + 4 * branches)
    for given, wide in zip(old.proj.weight.chunk(branches, 1), new.proj.weight.chunk(branches, 1), strict=True):
        assert torch.equal(wide[:, : 24 // branches], given)
    assert torch.equal(back.proj.weight, old.proj.weight)
    assert torch.equal(back.qkv.weight, old.qkv.weight)
