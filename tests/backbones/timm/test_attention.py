"""Any mechanism in timm's transformers: what is kept, what is told of the grid, what is refused."""

import copy
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention
from torch import Tensor, nn

import linvit
from linvit import Grid, UserError, replace_attention
from linvit.backbones.timm.hosts import ReplacedAttention
from linvit.registry import attentions
from tests.helpers import assert_exported_for_any_batch, assert_near, own_names, perturb, randn

SWIN = {"img_size": 56, "depths": (2, 2, 1, 1), "embed_dim": 24, "num_heads": (1, 2, 4, 8)}
NARROW = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 2}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("test_vit", {"img_size": 64}),
    ("test_vit", {"img_size": 64, "qk_norm": True, "qkv_bias": False}),
    ("test_vit", {"img_size": 64, "scale_attn_norm": True}),  # a norm of what attention mixes
    ("test_vit2", {"img_size": 64}),  # a register token
    ("test_vit3", {"img_size": 64}),
    ("deit_tiny_distilled_patch16_224", NARROW),
    ("vit_mediumd_patch16_reg4_gap_256", NARROW),
    ("vit_small_r26_s32_224", {"img_size": 64, "depth": 2}),  # patches of a convolutional stem
    ("beit_base_patch16_224", NARROW),  # no bias of k, relative positions
    ("eva_large_patch14_196", {**NARROW, "img_size": 56}),
    ("pvt_v2_b0", {"depths": (1, 1, 1, 1)}),
    ("pvt_v2_b2_li", {"depths": (1, 1, 1, 1)}),
    ("swin_tiny_patch4_window7_224", SWIN),
]


def images(*size: int, seed: int = 0) -> Tensor:
    return randn(2, 3, *size, seed=seed, dtype=torch.float32)


def vit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", **{"img_size": 64, "num_classes": 5, "depth": 2, **options}).eval()


def replaced(model: nn.Module) -> list[ReplacedAttention]:
    return [module for module in model.modules() if isinstance(module, ReplacedAttention)]


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), MODELS, ids=lambda value: value if isinstance(value, str) else "")
def test_softmax_in_the_place_of_softmax_changes_nothing(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = perturb(timm.create_model(name, **options).eval(), scale=0.1)
    size = options.get("img_size", 64)
    x = images(size, size)
    want = model(x)
    assert replace_attention(model, "softmax", size) is model
    assert replaced(model)
    assert_near(model(x), want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", own_names(attentions))
@pytest.mark.parametrize(("model", "options"), [("pvt_v2_b0", {"depths": (1, 1, 1, 1)}), (MODELS[-1][0], SWIN)])
def test_every_mechanism_in_pyramids(model: str, options: dict[str, Any], name: str) -> None:
    torch.manual_seed(0)
    network = timm.create_model(model, **options)
    if model.startswith("swin") and linvit.AttentionLayer(16, 2, linvit.Grid((4, 4)), attention=name).stem is not None:
        with pytest.raises(UserError, match="passes windows to its attention, so the stem"):
            replace_attention(network, name, 56)
        return
    network = replace_attention(network, name, 56)
    network(images(56, 56)).square().sum().backward()
    assert [key for key, parameter in network.named_parameters() if parameter.grad is None] == []


SURROUNDED = "tests.layers.test_attention_layer:Surrounded"


def test_stem_norm_and_gate_are_new_and_the_gate_is_open() -> None:
    model = vit()
    before = copy.deepcopy(model.state_dict())
    layer = replace_attention(model, SURROUNDED).blocks[0].attn
    assert torch.equal(layer.qkv.weight, before["blocks.0.attn.qkv.weight"][:128])
    x = randn(2, 17, 64, dtype=torch.float32)
    grid = layer.patches.grid
    mixed = layer.out_norm(layer.stem(x, grid).mean(1, keepdim=True).expand_as(x))
    torch.testing.assert_close(layer(x), layer.proj(mixed))


def test_a_stem_in_windows_that_are_cut_is_refused() -> None:
    with pytest.raises(UserError, match=r"the stem 'conv_silu' of Surrounded.*Set stem: none, or use"):
        replace_attention(timm.create_model(MODELS[-1][0], **SWIN), SURROUNDED)


def test_weights_are_kept() -> None:
    model = vit()
    before = copy.deepcopy(model.state_dict())
    after = replace_attention(model, "focused").state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(".attn.mechanism." in key for key in after.keys() - before.keys())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 16}, "a timm model keeps its 2 heads of 32 channels .* asks for 4 heads of 16 channels"),
        ({"heads_ratio": 2.0}, "asks for 4 heads of 32 channels and norm 'none'. Leave these options out"),
        ({"proj_norm": "bn2d"}, "its output projection without a norm; .* norm 'bn2d'"),
    ],
    ids=str,
)
def test_own_heads_and_a_norm_behind_the_projection_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace_attention(vit(), {"name": "enhanced_linear", **options})


def test_norms_of_q_and_k_act_on_what_is_projected() -> None:
    layer = replace_attention(vit(qk_norm=True), "soft").blocks[0].attn
    assert isinstance(layer.q_norm, nn.LayerNorm)
    assert isinstance(layer.k_norm, nn.Identity)


# The grid


@torch.no_grad()
def test_the_mechanism_is_told_the_grid_of_the_images() -> None:
    model = replace_attention(vit(reg_tokens=3), "focused")
    seen: list[Grid] = []
    for layer in replaced(model):
        layer.mechanism.register_forward_hook(lambda module, args, output: seen.append(args[3]))
    for size in [(64, 64), (32, 128), (128, 32), (48, 96)]:
        seen.clear()
        model(images(*size))
        assert seen == [Grid((size[0] // 16, size[1] // 16), num_prefix=4)] * 2


def test_windows_and_stages_are_grids() -> None:
    model = replace_attention(timm.create_model("swin_tiny_patch4_window7_224", **SWIN), "linformer", 56)
    assert {layer.mechanism.grid for layer in replaced(model)[:4]} == {Grid((7, 7))}
    model = replace_attention(timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1)), "linformer", (64, 128))
    assert [layer.mechanism.grid.size for layer in replaced(model)] == [(16, 32), (8, 16), (4, 8), (2, 4)]
    assert replaced(model)[0].mechanism.grid.kv_size == (2, 4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "beit_base_patch16_224"])
def test_another_input_size_as_timm_sets_it(name: str) -> None:
    torch.manual_seed(0)
    options = SWIN if name.startswith("swin") else {"img_size": 64, "depth": 1}
    model = perturb(timm.create_model(name, **options).eval(), scale=0.1)
    ours = replace_attention(copy.deepcopy(model), "softmax", options["img_size"])
    window = {"window_size": (8, 8)} if name.startswith("swin") else {}
    for network in (model, ours):
        network.set_input_size((96, 128), **window)
    assert_near(ours(images(96, 128)), model(images(96, 128)), 1e-5)


# As any timm model


def test_state_dict_round_trip_and_copy() -> None:
    model = perturb(replace_attention(vit(), "focused"))
    other = replace_attention(vit(), "focused")
    other.load_state_dict(model.state_dict())
    twin = copy.deepcopy(model)
    x, y = images(32, 64), images(64, 32)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
        model(y)  # the copy has a grid of its own
        assert torch.equal(twin(x), other(x))
        assert twin.blocks[0].attn.patches.grid.size == (2, 4)
        assert model.blocks[0].attn.patches.grid.size == (4, 2)


def test_checkpointing_changes_no_gradient() -> None:
    model = perturb(replace_attention(vit(), "focused")).train()
    found = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images(32, 96)).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(checkpointed, plain)


def test_a_grid_that_is_gone_is_an_error_not_a_guess() -> None:
    model = replace_attention(vit(), "focused").train()
    model.set_grad_checkpointing()
    early = model(images(64, 64)).sum()
    model(images(32, 32))
    with pytest.raises(UserError, match=r"got 17 tokens.*2x2 patches.*run backward before"):
        early.backward()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(dynamic: bool) -> None:
    model = perturb(replace_attention(vit(depth=1), "focused"))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with torch.no_grad():
        for size in [(64, 64), (32, 96)]:
            torch.testing.assert_close(compiled(images(*size)), model(images(*size)))


def test_keys_of_another_width_than_the_models_are_refused() -> None:
    with pytest.raises(UserError, match=r"timm model have 32 channels in each of 2 heads.*EfficientAttention needs 16"):
        replace_attention(vit(), {"name": "efficient", "key_ratio": 0.5})


# Which block gets what


def names(model: nn.Module) -> list[str]:
    return [type(layer.mechanism).__name__.removesuffix("Attention") for layer in replaced(model)]


def test_one_spec_per_block_or_per_stage() -> None:
    assert names(replace_attention(vit(), ["hydra", {"name": "linear", "feature_map": "relu"}])) == ["Hydra", "Linear"]
    pvt = timm.create_model("pvt_v2_b0", depths=(2, 1, 1, 1))
    assert names(replace_attention(pvt, ["hydra", "linear", "softmax", "focused"])) == [
        "Hydra",
        "Hydra",
        "Linear",
        "Softmax",
        "Focused",
    ]
    with pytest.raises(UserError, match=r"lists 3 specs, but this backbone has 2 block\(s\)"):
        replace_attention(vit(), ["hydra"] * 3)


def test_the_bias_goes_only_to_what_takes_one() -> None:
    model = replace_attention(timm.create_model(MODELS[-1][0], **SWIN), ["softmax", "linear", "linear", "linear"], 56)
    tables = [key for key, _ in model.named_parameters() if "relative_position_bias_table" in key]
    assert tables == [f"layers.0.blocks.{i}.attn.relative_position_bias_table" for i in (0, 1)]


# Refusals


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("resnet18", r"ResNet has no attention.*mixes tokens by Conv2d, MaxPool2d\. Leave attention out, or"),
        ("mvitv2_tiny", r"MultiScaleVit has no attention that linvit can replace.*MultiScaleAttention"),
        ("mobilevit_xxs", "ByobNet has no patch embedding that tells the grid"),
        (
            "swinv2_cr_tiny_224",
            "SwinTransformerV2Cr has no attention that linvit can replace.*WindowMultiHeadAttention",
        ),
    ],
)
def test_a_model_that_cannot_take_it_says_why(model: str, message: str) -> None:
    """In one line, which ends with where the models are that can (a dot does not match a line break)."""
    line = f"^.*{message}.*use one of timm's models that docs/guides/timm.md lists, such as vit_tiny_patch16_224$"
    with torch.device("meta"), pytest.raises(UserError, match=line):
        linvit.create_backbone({"name": "timm", "model": model}, attention="focused")


def test_what_has_no_place_is_refused() -> None:
    layer = vit().blocks[0]
    layer.attn = Attention(64, 2, gated=True)
    with pytest.raises(UserError, match=r"Attention also has gate, which a mechanism does not support"):
        replace_attention(layer, "focused")


def test_masks_are_refused_by_what_takes_none() -> None:
    tokens = images(64, 64)
    mask = torch.zeros(17, 17)
    with torch.no_grad():
        replace_attention(vit(), "softmax").forward_features(tokens, attn_mask=mask)
        with pytest.raises(UserError, match="LinearAttention in a timm model takes no mask"):
            replace_attention(vit(), "linear").forward_features(tokens, attn_mask=mask)


def test_shifted_windows_are_exported_for_any_number_of_images() -> None:
    sizes = {"img_size": 56, "window_size": 7, "embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2), "num_classes": 3}
    model = replace_attention(timm.create_model("swin_tiny_patch4_window7_224", **sizes), "softmax")
    assert_exported_for_any_batch(model, randn(3, 3, 56, 56, dtype=torch.float32), 1e-5)
