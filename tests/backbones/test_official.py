"""Official names, shapes and values: each family's state dicts fit its models, which compute what the classes do."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import linvit
from linvit.backbones.soft import softmax_free
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import LAYOUTS
from tests.official import cswin, fill, images, mlla, pvt, pvt_v2, ravlt, soft, swin

Shapes = Mapping[str, tuple[int, ...]]
SMALL_RAVLT = {"embed_dims": (16, 32, 48, 64), "num_heads": (2, 2, 3, 4), "depths": (1, 1, 2, 1), "head_width": 24}
OF_RAVLT = (SMALL_RAVLT["embed_dims"], SMALL_RAVLT["num_heads"], SMALL_RAVLT["depths"])
RAVLTS = {"rala": "ravlt_t", "mala": "mavit_t", "nala": "nalaformer_xt", "pola_pp": "pola_pp_b0"}
SMALL_MLLA = {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 4)}
SMALL_CSWIN = {"embed_dim": 8, "depths": (1, 2, 1, 1), "num_heads": (2, 2, 4, 4)}


def load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Translates an official state dict by the first layout that knows it, and loads it whole."""
    layout = next(layout for layout in LAYOUTS if layout.recognises(state))
    fitted = fit_projections(layout.translate(state), model)
    want = {key: t.shape for key, t in model.state_dict().items() if not key.endswith("num_batches_tracked")}
    assert {key: t.shape for key, t in fitted.items()} == want
    model.load_state_dict(fitted, strict=False, assign=True)


class Named(NamedTuple):
    """A model, its official shapes, and how many of its levels a network for dense tasks has."""

    spec: dict[str, Any]
    shapes: Callable[[], Shapes]
    levels: int | None = None


def swins() -> dict[str, Named]:
    found = {}
    for variant, side, window, stages in (("tiny", 224, 7, (0, 2)), ("base", 384, 12, (2,))):
        for focused in stages:
            spec = {"name": f"{'flatten_' if focused else ''}swin_{variant}", "img_size": side}
            spec["window_size"] = [None] * focused + [window] * (4 - focused)
            sizes = {"img_size": side, "window_size": window, "focused_stages": focused}
            for timm in (False, True):
                shapes = partial(swin.swin, **swin.SIZES[variant], **sizes, timm=timm)
                found[f"{spec['name']}{' of timm' * timm}"] = Named(spec, shapes)
    return found


def softs() -> dict[str, Named]:
    names = ("soft_tiny", "soft_huge", "soft_norm_tiny")
    return {name: Named({"name": name}, partial(soft.soft, **soft.SIZES[name.rpartition("_")[2]])) for name in names}


PVT = ("pvt_tiny", "pvt_large", "flatten_pvt_tiny")
PVT_V2 = ("pvt_v2_b0", "pvt_v2_b5", "pvt_v2_b2_li", "flatten_pvt_v2_b0")
CSWIN = ("cswin_tiny", "cswin_large_384", "flatten_cswin_tiny", "flatten_cswin_base_384")
DENSE_CSWIN = {"name": "cswin_tiny", **SMALL_CSWIN, "num_classes": 0, "feature_norms": True}
MODELS = {
    **{name: Named({"name": name}, partial(pvt.pvt, **pvt.VARIANTS[name])) for name in PVT},
    **{name: Named({"name": name}, partial(pvt_v2.pvt_v2, **pvt_v2.VARIANTS[name])) for name in PVT_V2},
    **{name: Named({"name": name}, cswin.MODELS[name]) for name in CSWIN},
    "dense cswin": Named(DENSE_CSWIN, partial(cswin.cswin, 8, (1, 2, 1, 1), dense=True, num_classes=0)),
    **swins(),
    **softs(),
    **{
        f"{'dense ' * dense}{name}": Named(
            {"name": name, **SMALL_RAVLT, "num_classes": 7, "feature_norms": dense},
            partial(ravlt.ravlt, *OF_RAVLT, kind=kind, projection=24, classes=7, dense=dense),
            4 if dense else None,
        )
        for kind, name in RAVLTS.items()
        for dense in (False, True)
    },
    **{
        f"{'dense ' * dense}mlla": Named(
            {"name": "mlla_tiny", **SMALL_MLLA, "num_classes": 0 if dense else 7, "feature_norms": dense},
            partial(mlla.mlla, 16, (1, 1, 2, 1), classes=7, dense=dense),
        )
        for dense in (False, True)
    },
}
TABLES = {  # which official files have, too, and models make themselves
    **{name: {"layers.0.RoPE.angle": (4,), "layers.3.RoPE_linear.angle": (16,)} for name in RAVLTS.values()},
    "mlla_tiny": {"layers.2.blocks.1.attn.rope.rotations": (14, 14, 32, 2)},
    "swin_tiny": {"layers.0.blocks.1.attn.relative_position_index": (1,), "layers.0.blocks.1.attn_mask": (1,)},
}


@pytest.mark.parametrize("name", MODELS)
def test_official_names_and_shapes_are_those_of_the_model(name: str) -> None:
    spec, shapes, levels = MODELS[name]
    with torch.device("meta"):
        model = linvit.create_backbone(spec)
        if levels is not None:
            model.prune_intermediate_layers(levels)
        load(model, {key: torch.empty(s) for key, s in {**shapes(), **TABLES.get(spec["name"], {})}.items()})


def test_norms_of_features_have_their_places() -> None:
    """Swin's, which its classes for dense tasks add, and those of VSSD and H-ViT^3."""
    for preset, official in (("swin_tiny", "norm"), ("vssd_tiny", "outnorm"), ("h_vittt_tiny", "norm")):
        with torch.device("meta"):
            model = linvit.create_backbone(preset, num_classes=0, depths=(1, 1, 1, 1), feature_norms=True)
        (layout,) = (layout for layout in LAYOUTS if layout.name == preset.removesuffix("_tiny"))
        assert {layout.rename(f"{official}{i}.weight") for i in range(4)} == {
            name for name in model.state_dict() if name.startswith(("feature_norms", "norm")) and "weight" in name
        }


# Values of the official classes in float64, for parameters that follow from their names, on images of 224 x 224 or as
# given: first logits of the first image and their sum; of whole presets also the mean of the absolute values, and the
# first logit of the second image.
PRESETS = {
    "pvt_tiny": [0.11791222, 0.095549863, -0.5879812, 0.63741668, -17.037417, 0.36246129, -0.14432164],
    "pvt_tiny 256 320": [0.12417038, 0.069322604, -0.78437197, 0.94985264, -18.955151, 0.36584671, 0.32908188],
    "flatten_pvt_tiny": [0.13368815, 0.15465117, -0.20752287, 0.039385001, -2.252192, 0.10068707, 0.064595928],
    "pvt_v2_b0": [-0.071285144, -0.028565052, 0.025421329, -0.093230726, -4.524666, 0.053803562, -0.054994472],
    "pvt_v2_b0 256 320": [
        -0.043539103,
        -0.012869316,
        0.087515258,
        -0.0014701327,
        -5.0669169,
        0.054198342,
        -0.064497235,
    ],
    "pvt_v2_b2_li": [-0.02039492, -0.12183461, -0.20298905, -0.0040951321, 11.488558, 0.096214212, -0.012282857],
    "flatten_pvt_v2_b0": [-0.090385574, -0.023506715, 0.020882644, -0.098897301, -5.0404408, 0.053628374, -0.058631076],
    "swin_tiny": [0.23618452, -0.011617991, 0.32869829, 0.071809204, -7.8216741, 0.18373654, 0.37925982],
    "flatten_swin_tiny": [0.22879061, -0.0058251337, 0.32479659, 0.11353554, -8.6211908, 0.18348287, 0.38370372],
    "cswin_tiny": [0.063248203, -0.15178819, -0.23668129, -0.017876769, -4.4246263, 0.097441375, -0.043140599],
    "flatten_cswin_tiny": [0.084720453, -0.13961716, -0.20334285, 0.026575389, -2.8346186, 0.098244006, -0.023824658],
    "soft_tiny": [0.087593245, 0.029031588, 0.19701002, 0.5076676, -74.778067, 0.36413914, 0.11231073],
    "soft_tiny 256 320": [0.19673831, -0.059706144, 0.25016685, 0.17760498, -70.479623, 0.36745676, 0.18507556],
    "soft_norm_tiny": [0.093040076, 0.06549111, 0.33859877, 0.70748229, -62.845476, 0.3630238, 0.075061022],
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "pvt_v2_b0 256 320" else pytest.mark.slow) for n in PRESETS]
)
@torch.no_grad()
def test_presets_give_the_official_values(name: str) -> None:
    preset, *size = name.split()
    spec = {"name": preset}
    if preset == "soft_norm_tiny":  # one alpha for the batch
        spec["attention"] = [{**stage, "alpha_scope": "batch"} for stage in softmax_free("soft_norm")[:3]] + ["softmax"]
    model = linvit.create_backbone(spec).double().eval()
    load(model, fill(MODELS[preset].shapes()))
    out = model(images(*map(int, size or (224, 224))))
    got = [*out[0, :4].tolist(), out.sum().item(), out.abs().mean().item(), out[1, 0].item()]
    assert got == pytest.approx(PRESETS[name], rel=1e-6)


SMALL = {
    "ravlt_t 64 64": [64.6396103165, 87.3130711183, 40.0378409248, 107.668407742],
    "ravlt_t 96 64": [19.328762538, 96.0628019666, -36.0103004048, 246.89354563],
    "mavit_t 64 64": [61.0685279012, 89.9345781147, 40.8854162927, 102.759563846],
    "mavit_t 96 64": [17.4550854283, 93.43620135, -34.4669195695, 239.019467467],
    "nalaformer_xt 64 64": [70.0041249708, 144.089177736, 87.7799076111, -177.974904415],
    "nalaformer_xt 96 64": [135.357894297, 134.556449102, -87.0445213356, -56.1193171651],
    "pola_pp_b0 64 64": [67.5636252085, 77.1392619554, 31.1795975073, 126.043831739],
    "pola_pp_b0 96 64": [27.8687040471, 93.3586820097, -39.4940041752, 281.814367309],
    "mlla 64 64": [0.176553795648, 1.85147230059, -0.298706502842, -0.86506783405],
}


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_small_models_give_the_official_values(name: str) -> None:
    """Rotations too."""
    key, *size = name.split()
    model = linvit.create_backbone({**MODELS[key].spec, "img_size": 64}).double().eval()
    load(model, fill(MODELS[key].shapes(), scale=0.2))
    out = model(images(*map(int, size)))
    assert [*out[0, :3].tolist(), out.sum().item()] == pytest.approx(SMALL[name], rel=1e-9)
