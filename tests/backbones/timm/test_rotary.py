"""Timm's models with rotary positions: q and k are turned by the model's own tables before any mechanism sees them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import linvit
from linvit import UserError, replace_attention
from linvit.analysis.recorder import Recorder, observe
from linvit.backbones.timm.hosts import ReplacedAttention
from linvit.registry import attentions
from tests.helpers import assert_near, own_names, perturb, randn

SMALL: dict[str, Any] = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 2, "num_classes": 5}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("vit_small_patch16_dinov3", {}),  # a class and four register tokens
    ("vit_small_patch16_dinov3_qkvb", {}),
    ("vit_7b_patch16_dinov3", {}),
    ("vit_small_patch16_lingbot", {}),
    ("eva02_tiny_patch14_224", {"img_size": 56}),
    ("eva02_base_patch14_224", {"img_size": 56}),  # three projections, of which k has no bias
    ("eva02_base_patch16_clip_224", {}),  # a norm of what attention mixes
    ("vit_pe_core_tiny_patch16_384", {"attn_pool_num_heads": 2}),
    ("vit_pe_spatial_tiny_patch16_512", {}),
    ("vit_medium_patch16_rope_reg1_gap_256", {}),
    ("vit_small_patch16_rope_224", {}),
    ("vit_small_patch16_rope_ape_224", {}),
    ("vit_small_patch16_rope_mixed_224", {}),  # learnt frequencies, a table per block and head
    ("vit_small_patch16_rope_mixed_ape_224", {}),
    ("vit_base_patch16_sapiens2", {"num_kv_heads": 1}),  # heads that share keys and values; norms of q and k
]


def model(name: str = "vit_small_patch16_dinov3", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    built = timm.create_model(name, **{**SMALL, "dynamic_img_size": True, **options})
    return perturb(built.eval(), scale=0.1)


def images(*size: int) -> Tensor:
    return randn(2, 3, *size, dtype=torch.float32)


def gradients(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    network.zero_grad()
    x = x.clone().requires_grad_()
    out = network(x)
    out.backward(randn(*out.shape, seed=1, dtype=torch.float32))
    found = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
    return {"output": out.detach(), "input": x.grad, **found}


@pytest.mark.parametrize(("name", "options"), MODELS, ids=lambda value: value if isinstance(value, str) else "")
def test_softmax_in_a_rotary_model_changes_nothing(name: str, options: dict[str, Any]) -> None:
    theirs = model(name, **options)
    ours = replace_attention(copy.deepcopy(theirs), "softmax", 64)
    assert len([layer for layer in ours.modules() if isinstance(layer, ReplacedAttention)]) == 2
    patch = theirs.patch_embed.patch_size[0]
    for size in ((4 * patch, 4 * patch), (3 * patch, 5 * patch)):
        want, got = (gradients(network, images(*size)) for network in (theirs, ours))
        same = [key for key in want if key in got and got[key].shape == want[key].shape]
        assert len(same) > 20
        for key in same:
            assert_near(got[key], want[key], 1e-5)


OWN_ROTARY = {"mlla": "none", "rala": False, "mala": False, "nala": False, "pola_pp": False}


@pytest.mark.parametrize("name", own_names(attentions))
def test_every_mechanism_gets_the_turned_queries_and_keys_or_says_why_not(name: str) -> None:
    theirs = model(depth=1)
    spec: dict[str, Any] = {"name": name}
    if name in OWN_ROTARY:
        with pytest.raises(UserError, match=r"Eva rotates q and k by its rotary positions, and \w+ would .* to false"):
            replace_attention(copy.deepcopy(theirs), spec, 64)
        spec["rotary"] = OWN_ROTARY[name]
    if name in ("poly_nl", "separable"):
        with pytest.raises(UserError, match=r"rotates queries by its rotary positions, and \w+ projects none"):
            replace_attention(copy.deepcopy(theirs), spec, 64)
        if name == "separable":
            return
        spec["project_q"] = True
    ours = replace_attention(copy.deepcopy(theirs), spec, 64)
    found = gradients(ours, images(48, 80))
    assert [key for key, parameter in ours.named_parameters() if key.startswith("blocks") and key not in found] == []
    if ours.blocks[0].attn.stem is None:
        x = images(48, 80)
        want, got = (observe(network, x)["blocks.0.attn"] for network in (theirs, ours))
        torch.testing.assert_close(got.q, want.q)
        assert name == "soft" or "k" not in ours.blocks[0].attn.projections or torch.equal(got.k, want.k)


@torch.no_grad()
@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224"])
def test_maps_are_those_of_the_rotary_model(name: str) -> None:
    theirs, x = model(name, depth=1), images(48, 80)[:1]
    found = observe(theirs, x)["blocks.0.attn"].matrix()
    weights: list[Tensor] = []
    theirs.blocks[0].attn.fused_attn = False
    theirs.blocks[0].attn.attn_drop.register_forward_pre_hook(lambda module, args: weights.append(args[0][0]))
    theirs(x)
    assert_near(found, weights[0].double(), 1e-5)


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224"])
def test_dropped_patches_keep_their_positions(name: str) -> None:
    theirs = model(name, patch_drop_rate=0.5).train()
    ours = replace_attention(copy.deepcopy(theirs), "softmax", 64)
    found = []
    for network in (theirs, ours):
        torch.manual_seed(3)
        found.append(network(images(64, 96)))
    assert_near(found[1], found[0], 1e-5)
    with pytest.raises(UserError, match=r"Eva drops patches in training, and FocusedAttention needs the whole plane"):
        replace_attention(model(name, patch_drop_rate=0.5), "focused", 64)


@torch.no_grad()
def test_masks_of_truth_values_say_what_takes_part() -> None:
    theirs, x = model(), images(64, 64)
    mask = torch.rand(21, 21, generator=torch.Generator().manual_seed(0)) > 0.3
    want = theirs.forward_intermediates(x, attn_mask=mask)[0]
    with Recorder(replace_attention(theirs, "softmax")) as recorder:
        assert_near(theirs.forward_intermediates(x, attn_mask=mask)[0], want, 1e-5)
    assert (recorder.calls["blocks.0.attn"].matrix()[:, ~mask] == 0).all()
    with pytest.raises(UserError, match="SoftmaxAttention in a timm model takes no causal mask"):
        theirs.forward_intermediates(x, is_causal=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_drop_rate": 0.1}, r"drops weights of its attention in training \(rate 0.1\).*attn_drop_rate=0"),
        ({"embed_dim": 48, "num_heads": 2, "scale_attn_inner": True}, "outputs 96. Remove the option that widens it"),
    ],
    ids=str,
)
def test_what_has_no_place_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace_attention(model(**options), "enhanced_linear")


def test_a_linear_student_of_a_rotary_teacher() -> None:
    teacher = model()
    student = linvit.linearize(teacher, "linear").train()
    distillation = linvit.Distillation(teacher, student, linvit.Matching(attention_inputs="teacher"))
    student(images(48, 80))
    distillation.loss().backward()
    assert distillation.layers == ["blocks.0.attn", "blocks.1.attn"]
    assert student.blocks[0].attn.qkv.weight.grad.any()
    twin = linvit.linearize(teacher, "softmax").train()
    distillation = linvit.Distillation(teacher, twin)
    twin(images(48, 80))
    assert distillation.loss() < 1e-8


@torch.no_grad()
@pytest.mark.parametrize("name", ["eva02_base_patch14_224", "beit_base_patch16_224"])
def test_weights_of_separate_projections_load_from_a_file(name: str, tmp_path: Path) -> None:
    """EVA-02's three projections, of which the keys have no bias, and BEiT's biases beside one projection."""
    options = {**SMALL, "img_size": 56 if "14" in name else 64}
    theirs = perturb(timm.create_model(name, **options).eval(), scale=0.1)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = replace_attention(timm.create_model(name, **options).eval(), "softmax", options["img_size"])
    report = linvit.load_pretrained(ours, tmp_path / "weights.pth")
    assert not report.missing
    x = images(options["img_size"], options["img_size"])
    assert_near(ours(x), theirs(x), 1e-5)
