"""EfficientViT equals timm's port of it, from files under timm's names and under the authors'."""

import copy
import re

import pytest
import timm
import torch
from torch import Tensor

import linvit
from linvit.weights.layouts.backbones import EFFICIENTVIT, LAYOUTS
from tests.helpers import assert_near, randn

LITE_MLA = {"name": "enhanced_linear", "proj_norm": "bn2d", "eps": 1e-5}  # of timm, 1e-15 of the authors
SLOW = [pytest.param(size, marks=pytest.mark.slow) for size in ("b1", "b2", "b3")]
OFFICIAL = (
    (r"^head\.in_conv", "head.op_list.0"),
    (r"^head\.classifier\.0", "head.op_list.2.linear"),
    (r"^head\.classifier\.1", "head.op_list.2.norm"),
    (r"^head\.classifier\.4", "head.op_list.3.linear"),
    (r"^stem\.in_conv", "backbone.input_stem.op_list.0"),
    (r"^stem\.res0", "backbone.input_stem.op_list.1"),
    (r"^stages\.(\d)\.blocks", r"backbone.stages.\1.op_list"),
)


def authors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of timm under the authors' names."""
    renamed = {}
    for key, tensor in state.items():
        name = key
        for pattern, new in OFFICIAL:
            name = re.sub(pattern, new, name)
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("size", ["b0", *SLOW])
def test_equals_timms(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # to which timm's attention casts
    torch.manual_seed(0)
    name = f"efficientvit_{size}"
    theirs = timm.create_model(name, num_classes=7).double().eval()
    for key, tensor in theirs.state_dict().items():
        if tensor.ndim == 1:  # of norms and biases
            tensor += 0.2 * (torch.rand_like(tensor) if "running_var" in key else torch.randn_like(tensor))
    ours = linvit.create_backbone(name, LITE_MLA, num_classes=7).double().eval()
    files = theirs.state_dict(), authors(theirs.state_dict())
    assert [next(layout for layout in LAYOUTS if layout.recognises(file)) for file in files] == [EFFICIENTVIT] * 2
    state, same_state = (EFFICIENTVIT.translate(file) for file in files)
    assert state.keys() == same_state.keys()
    assert all(tensor.equal(same_state[key]) for key, tensor in state.items())
    ours.load_state_dict(state)
    x, same = (randn(2, 3, 61, 83, grad=True) for _ in range(2))
    want, got = theirs.forward_intermediates(x), ours.forward_intermediates(same)
    for features, expected in zip(got[1], want[1], strict=True):
        assert_near(features, expected, 1e-9)
    want, got = theirs.forward_head(want[0]), ours.forward_head(got[0])
    assert_near(got, want, 1e-9)
    want.square().sum().backward()
    got.square().sum().backward()
    assert_near(same.grad, x.grad, 1e-8)


def test_attention_is_that_of_the_last_two_stages() -> None:
    model = linvit.create_backbone("efficientvit_b0", ["hydra", "linear"], num_classes=0, img_size=64)
    found = [type(module).__name__ for module in model.modules() if isinstance(module, linvit.Attention)]
    assert found == ["HydraAttention"] * 2 + ["LinearAttention"] * 2
    with pytest.raises(
        linvit.UserError, match=r"attention lists 4 specs, but this backbone has 5 block\(s\) in 2 stage"
    ):
        linvit.create_backbone("efficientvit_b0", ["hydra"] * 4, depths=(2, 2, 2, 3))


DEIT = {"name": "deit_nano", "attention": {"name": "enhanced_linear", "proj_norm": "bn2d"}}


@pytest.mark.parametrize("spec", ["efficientvit_b0", DEIT], ids=["efficientvit", "deit"])
def test_checkpointing_counts_a_batch_once(spec: linvit.registry.Spec) -> None:
    """BatchNorm's statistics, and so the evaluation, are those of training without it."""
    plain = linvit.create_backbone(spec, img_size=32, num_classes=2).train()
    other = copy.deepcopy(plain)
    other.set_grad_checkpointing()
    x = randn(2, 3, 32, 32, dtype=torch.float32)
    for model in (plain, other):
        model(x).square().sum().backward()
    for (name, got), want in zip(other.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(got, want), name
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(other.parameters(), plain.parameters(), strict=True))
