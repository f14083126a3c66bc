"""Another attention in a model that is built: linvit's families, bare layers, and what is refused."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

import linvit
from linvit import Attention, AttentionLayer, Grid, UserError, replace_attention
from linvit.backbones.replace_attention import softmax_blocks
from linvit.layers.attention_layer import AttentionLayer as Layer
from linvit.registry import backbones
from linvit.registry.signatures import parameters_of
from tests.families import families, small
from tests.helpers import perturb, randn

OWN = [name for name in sorted({*families().values()} - {"timm"}) if "attention" in parameters_of(backbones.get(name))]
NARROW = {"name": "efficient", "key_ratio": 0.5}
X = randn(2, 3, 64, 64, dtype=torch.float32)


def build(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return linvit.create_backbone({**small(name), "img_size": 64, "num_classes": 5, **options}).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", OWN)
def test_the_same_attention_changes_nothing(name: str) -> None:
    model = perturb(build(name, attention="softmax"), scale=0.1)
    want = model(X)
    before = list(model.state_dict())
    assert replace_attention(model, "softmax") is model
    assert torch.equal(model(X), want)
    assert list(model.state_dict()) == before
    assert not model.training


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param(name, spec, marks=[] if i % 4 == j else pytest.mark.slow)  # one each; the slow tests have all
        for i, name in enumerate(OWN)
        for j, spec in enumerate(("focused", "soft", "enhanced_linear", NARROW))
    ],
    ids=str,
)
def test_the_model_becomes_what_the_constructor_builds(name: str, spec: linvit.registry.Spec) -> None:
    """The same parameters of the same shapes, and all of them are trained; those outside the attention keep values."""
    model = perturb(build(name, attention="softmax"), scale=0.1)
    before = copy.deepcopy(model.state_dict())
    after = replace_attention(model, spec).state_dict()
    want = build(name, attention=spec).state_dict()
    assert {key: value.shape for key, value in after.items()} == {key: value.shape for key, value in want.items()}
    kept = [key for key in after if key in before and after[key].shape == before[key].shape]
    assert all(torch.equal(after[key], before[key]) for key in kept if ".mechanism." not in key)
    assert any(".proj." in key for key in kept)
    model.train()(X).square().sum().backward()
    assert [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


@torch.no_grad()
@pytest.mark.parametrize("spec", ["focused", "mlla"])
@pytest.mark.parametrize("name", ["pvt_v2_b0", "ravlt_t", "mavit_t", "soft_tiny", "soft_norm_tiny", "swin_tiny"])
def test_new_parameters_have_the_initial_values_of_the_constructor(name: str, spec: str) -> None:
    """But for the gate, which is open. PVTv2 and RAVLT initialise convolutions, SOFT++ takes torch's linear layers."""
    after, want = replace_attention(build(name, attention="hydra"), spec), build(name, attention=spec)
    compared = 0
    for (key, own), other in zip(after.named_parameters(), want.parameters(), strict=True):
        if ".attn." in key and ".gate." not in key:
            assert own.std().item() == pytest.approx(other.std().item(), rel=8 * own.numel() ** -0.5, abs=1e-9), key
            compared += 1
    assert compared > 20


@torch.no_grad()
def test_rows_of_each_letter_are_kept() -> None:
    model = perturb(build("deit_nano"))
    q, k, v = model.blocks[0].attn.qkv.weight.clone().chunk(3)
    replace_attention(model, "soft")
    assert torch.equal(model.blocks[0].attn.qkv.weight, torch.cat([q, v]))
    replace_attention(model, "softmax")  # the keys were the queries
    assert torch.equal(model.blocks[0].attn.qkv.weight, torch.cat([q, q, v]))
    replace_attention(model, NARROW)
    assert torch.equal(model.blocks[0].attn.qkv.weight[-len(v) :], v)
    stripes = perturb(build("cswin_tiny"))
    layer = stripes.stages[0].blocks[0].attn
    q, k, v = layer.qkv.weight.clone().chunk(3)
    lepe = layer.branches[1].lepe.weight.clone()
    replace_attention(stripes, "poly_nl")
    layer = stripes.stages[0].blocks[0].attn
    assert torch.equal(layer.qkv.weight, torch.cat([k, v]))
    assert torch.equal(layer.branches[1].lepe.weight, lepe)


@torch.no_grad()
def test_a_gate_of_another_kind_begins_at_1() -> None:
    model = linvit.create_backbone({"name": "deit_nano", "depth": 1}, attention="mlla")  # whose gate is SiLU's
    linvit.replace_attention(model, "pola")
    x, gate = torch.randn(1, 2, 96), model.blocks[0].attn.gate
    assert torch.equal(gate(torch.ones(1, 2, gate.out_features), x), torch.ones(1, 2, gate.out_features))


def test_a_widened_output_keeps_the_first_channels_of_each_head_and_back() -> None:
    model = perturb(build("deit_nano"))
    weight = model.blocks[0].attn.proj.weight.clone()
    heads, width = model.blocks[0].attn.mechanism.num_heads, model.blocks[0].attn.mechanism.head_dim
    replace_attention(model, "enhanced_linear")
    wide = model.blocks[0].attn.proj.weight
    assert torch.equal(wide.unflatten(1, (heads, -1))[:, :, :width].flatten(1), weight)
    replace_attention(model, "softmax")
    assert torch.equal(model.blocks[0].attn.proj.weight, weight)


def test_one_spec_per_stage_and_per_block() -> None:
    model = replace_attention(build("swin_tiny"), ["hydra", "linear", "softmax", "focused"])
    found = [type(m).__name__.removesuffix("Attention") for m in model.modules() if isinstance(m, Attention)]
    assert found == ["Hydra", "Linear", "Softmax", "Focused"]
    with pytest.raises(UserError, match=r"lists 3 specs, but this backbone has 2 block\(s\) in 1 stage"):
        replace_attention(build("deit_nano"), ["softmax"] * 3)


def test_layers_that_share_parameters_are_tied() -> None:
    model = replace_attention(build("deit_nano"), {"name": "linformer", "share": "layerwise", "k": 4})
    assert len({block.attn.mechanism.proj_k for block in model.blocks}) == 1


@torch.no_grad()
def test_the_copy_of_a_replaced_model_and_its_pickle_work() -> None:
    model = replace_attention(build("swin_tiny"), "focused")
    assert torch.equal(copy.deepcopy(model)(X), model(X))
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), model(X))


@torch.no_grad()
def test_models_that_timm_wraps_for_features() -> None:
    for name in ("test_vit", "flatten_pvt_v2_b0"):
        model = timm.create_model(name, features_only=True, img_size=64)
        assert replace_attention(model, "hydra", 64) is model
        assert {type(m).__name__ for m in model.modules() if isinstance(m, Attention)} == {"HydraAttention"}
        assert model(X)[-1].isfinite().all()


def test_layers_outside_a_backbone_keep_dtype_and_mode() -> None:
    net = nn.Sequential(AttentionLayer(24, 3, Grid((4, 4)))).double().train()
    replace_attention(net, "linear")
    assert net[0].mechanism.__class__.__name__ == "LinearAttention"
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    assert net[0].training


class Own(Layer):
    """A layer that says nothing of how it is built."""


def test_what_cannot_be_rebuilt_is_refused() -> None:
    with pytest.raises(UserError, match=r"0 is a Own and has no way to build another like it; set `self.like`"):
        replace_attention(nn.Sequential(Own(24, 3, Grid((4, 4)))), "linear")
    with pytest.raises(UserError, match="rel_pos_bias is for a mechanism that takes a bias"):
        replace_attention(build("deit_nano", rel_pos_bias=True), "linear")
    with pytest.raises(UserError, match=r"has been replaced by LinearAttention, .* Replace that of a fresh model"):
        replace_attention(replace_attention(timm.create_model("test_vit"), "linear"), "hydra")
    with pytest.raises(
        UserError, match=r"FeatureListNet has taken the model apart\. Create it with feature_cls='getter'"
    ):
        replace_attention(timm.create_model("pvt_v2_b0", features_only=True), "linear")
    with pytest.raises(UserError, match="Sequential has no attention that linvit can replace"):
        replace_attention(nn.Sequential(nn.Linear(3, 3)), "linear")


def test_softmax_blocks_are_counted() -> None:
    specs = ["softmax", {"name": "window", "window_size": 4}, "agent", "softmax"]
    assert softmax_blocks(linvit.create_backbone("deit_nano", specs)) == 2
    vit = timm.create_model("vit_tiny_patch16_224", depth=4, img_size=64)
    assert softmax_blocks(vit) == 4
    assert softmax_blocks(replace_attention(vit, {"layout": "first_half"}, 64)) == 2
    assert softmax_blocks(timm.create_model("resnet18")) is None
