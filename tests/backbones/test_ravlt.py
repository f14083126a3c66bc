"""RAVLT, MAViT, NaLaFormer and PolaFormer++ equal their reference codes, which share one network."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linvit
from linvit import UserError
from linvit.backbones.ravlt import RAVLT
from linvit.tasks.parameter_groups import parameter_groups
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import RAVLT as LAYOUT
from tests.official import fill, images
from tests.official.ravlt import ravlt as official

SIZES = {"embed_dims": (16, 32, 48, 64), "num_heads": (2, 2, 3, 4), "depths": (1, 1, 2, 1)}
KINDS = {"rala": "ravlt_t", "mala": "mavit_t", "nala": "nalaformer_xt", "pola_pp": "pola_pp_b0"}


def small(name: str = "ravlt_t", **options: Any) -> RAVLT:
    """A small model in evaluation mode."""
    torch.manual_seed(0)
    model = linvit.create_backbone(name, **{**SIZES, "head_width": 24, "num_classes": 7, "img_size": 64, **options})
    assert isinstance(model, RAVLT)
    return model.eval()


def load_official(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    model.load_state_dict(fit_projections(LAYOUT.translate(state), model))


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "size", "first", "total"),
    [
        ("rala", (64, 64), [64.6396103165, 87.3130711183, 40.0378409248], 107.668407742),
        ("rala", (96, 64), [19.328762538, 96.0628019666, -36.0103004048], 246.89354563),
        ("mala", (64, 64), [61.0685279012, 89.9345781147, 40.8854162927], 102.759563846),
        ("mala", (96, 64), [17.4550854283, 93.43620135, -34.4669195695], 239.019467467),
        ("nala", (64, 64), [70.0041249708, 144.089177736, 87.7799076111], -177.974904415),
        ("nala", (96, 64), [135.357894297, 134.556449102, -87.0445213356], -56.1193171651),
        ("pola_pp", (64, 64), [67.5636252085, 77.1392619554, 31.1795975073], 126.043831739),
        ("pola_pp", (96, 64), [27.8687040471, 93.3586820097, -39.4940041752], 281.814367309),
    ],
)
def test_gives_the_reference_values(kind: str, size: tuple[int, int], first: list[float], total: float) -> None:
    """Numbers of the official classes in float64, rotations too, for parameters that follow from their names."""
    model = small(KINDS[kind]).double()
    load_official(model, fill(official(*SIZES.values(), kind=kind, projection=24, classes=7), scale=0.2))
    out = model(images(*size))
    assert [*out[0, :3].tolist(), out.sum().item()] == pytest.approx([*first, total], rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dense", [False, True])
def test_official_names_and_shapes_are_those_of_the_model(kind: str, dense: bool) -> None:
    with torch.device("meta"):
        model = small(KINDS[kind], feature_norms=dense)
    if dense:
        model.prune_intermediate_layers(4)
    shapes = official(*SIZES.values(), kind=kind, projection=24, classes=7, dense=dense)
    tables = {"layers.0.RoPE.angle": (4,), "layers.3.RoPE_linear.angle": (16,)}
    state = {key: torch.empty(shape, device="meta") for key, shape in {**shapes, **tables}.items()}
    assert LAYOUT.recognises(state)
    ours = fit_projections(LAYOUT.translate(state), model)
    want = {key: t.shape for key, t in model.state_dict().items() if not key.endswith("num_batches_tracked")}
    assert {key: t.shape for key, t in ours.items()} == want


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_scale": (1, 1)}, r"layer_scale must list 4 values, one per stage; got \[1, 1\]"),
        ({"depths": (1, 1, 1)}, r"depths must list 4 values"),
        ({"num_heads": (2, 2, 8, 4)}, "rotary position embeddings turn pairs of channels"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(**options)
