"""Polarity-aware linear attention equals its formula, one channel at a time, and PolaFormer's code."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import AttentionLayer, Grid
from linvit.attention.pola import PolaAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids

REDUCED = Grid((4, 6), kv_size=(2, 3), num_prefix=1)
OPTIONS = [
    {},
    {"alpha": 0, "learn_scale": False, "pos_enc": False},
    {"alpha": 1.5, "eps": 0.3, "dwc_kernel": 3},
    {"dwc": False},
]


def naive_maps(module: PolaAttention, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    """The matrices (B, h, d, N, M) of the linear attention, channel by channel of the values."""
    heads, width = q.shape[1], q.shape[3]
    if module.positional_encoding is not None:
        encoding = module.positional_encoding  # at the nominal grid
        k = k + F.pad(encoding, (0, 0, grid.num_prefix, 0)).unflatten(2, (heads, width)).transpose(1, 2)
    if module.scale is not None:
        scale = torch.log(1 + torch.exp(module.scale)).view(1, heads, 1, width)
        q, k = q / scale, k / scale
    power = 1 + module.alpha / (1 + torch.exp(-module.power))

    def half(x: Tensor, sign: int) -> Tensor:
        return torch.where(sign * x > 0, x.abs(), 0) ** power

    maps = []
    for channel in range(module.head_dim):
        sign = 1 if 2 * channel < module.head_dim else -1
        weights = half(q, sign) @ half(k, 1).mT + half(q, -sign) @ half(k, -1).mT
        maps.append(weights / (weights.sum(-1, keepdim=True) + grid.num_keys * module.eps))
    return torch.stack(maps, dim=2)


def naive(module: PolaAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    maps = naive_maps(module, q, k, grid)
    out = (maps @ v.mT.unsqueeze(-1)).squeeze(-1).mT
    return out if module.dwc is None else out + module.convolved(v, grid)  # as tests of focused attention hold it


@pytest.mark.parametrize(
    ("options", "grid", "dim"),
    [*((*case, 24) for case in options_then_grids(OPTIONS, [REDUCED, Grid((3, 5), num_prefix=1)])), ({}, REDUCED, 15)],
    ids=str,
)
def test_equals_formula(options: dict[str, object], grid: Grid, dim: int) -> None:
    """Also with an odd number of channels per head, of which the first half is the larger one."""
    module = mechanism({"name": "pola", **options}, grid, dim=dim)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, grid)
    unused = [module.power] if options.get("alpha") == 0 else []
    sources = [*given.tensors, *(p for p in module.parameters() if all(p is not x for x in unused))]
    assert_same_gradients(given(module, grid), want, sources, 1e-9)


@both_precisions
@of_case("pola_core")
def test_equals_polaformer(golden: Golden, dtype: torch.dtype) -> None:
    q, k, v = given = golden.inputs(dtype)
    official, size = golden.constructor, (golden.kwargs["H"], golden.kwargs["W"])
    ratio = official["sr_ratio"]
    grid = Grid(size, kv_size=(size[0] // ratio, size[1] // ratio))
    options = {"alpha": official["alpha"], "dwc_kernel": official["kernel_size"]}
    module = PolaAttention(official["dim"], official["num_heads"], grid, **options).to(dtype)
    module.load_state_dict(golden.parameters())
    golden.check_call(module(q, k, v, grid), given)
    golden.check_parameters(module, str)


@both_precisions
@of_case("pola_pvt", "pola_swin")
def test_layer_equals_polaformers(golden: Golden, dtype: torch.dtype) -> None:
    """Its query and gate share a linear layer in PVT, and all four projections in Swin."""
    (x,) = given = golden.inputs(dtype)
    grid = Grid((golden.kwargs["H"], golden.kwargs["W"]))
    p = {name: t.to(dtype, copy=True).requires_grad_() for name, t in golden.parameters().items()}
    layer = AttentionLayer(16, golden.constructor["num_heads"], grid, attention="pola").to(dtype)
    own = {f"mechanism.{name}": p[name] for name in ("scale", "power", "positional_encoding")}
    for kind in ("weight", "bias"):
        if "qkvg.weight" in p:
            q, k, v, g = p[f"qkvg.{kind}"].chunk(4)
        else:
            (q, g), (k, v) = (p[f"{name}.{kind}"].chunk(2) for name in ("qg", "kv"))
        own |= {f"qkv.{kind}": torch.cat([q, k, v]), f"gate.{kind}": g, f"proj.{kind}": p[f"proj.{kind}"]}
        own[f"mechanism.dwc.{kind}"] = p[f"dwc.{kind}"]
    golden.check_call(torch.func.functional_call(layer, own, (x, grid), strict=True), given)
    for name in golden.named("grad_param."):
        golden.check(name, p[name.removeprefix("grad_param.")].grad)


def test_gate_is_the_hosts_under_spatial_reduction_too() -> None:
    layer = AttentionLayer(24, 3, Grid((4, 6)), attention="pola", sr_ratio=2).double()
    x = inputs(layer.mechanism, Grid((4, 6))).q.transpose(1, 2).flatten(2)
    before = layer(x, Grid((4, 6)))
    layer.gate.init_open()
    opened = layer(x, Grid((4, 6)))
    ungated = AttentionLayer(24, 3, Grid((4, 6)), attention={"name": "pola", "gate": "none"}, sr_ratio=2).double()
    ungated.load_state_dict({name: t for name, t in layer.state_dict().items() if not name.startswith("gate.")})
    assert_near(ungated(x, Grid((4, 6))), opened, 1e-12)
    assert (before - opened).abs().max() > 1e-3


def test_powers_begin_at_one_and_half_of_alpha() -> None:
    module = PolaAttention(24, 3, Grid((4, 4)), pos_enc=False, learn_scale=False)
    x = torch.tensor([-2.0, 3.0]).repeat(1, 1, 12)
    assert_near(module._phi(x.dtype, x.dtype, x)[0, 0, 0], torch.tensor([0.0, 27.0] * 4 + [8.0, 0.0] * 4), 1e-6)
