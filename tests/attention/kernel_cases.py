"""The kernels of linear attention in Triton's interpreter, beside the formula in float64: a JSON line for each case.

`TRITON_INTERPRET=1 python -m tests.attention.kernel_cases`.
"""

import copy
import json
import math
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid, Packed, create_attention
from linvit.attention.kernels import Formula, linear, linear_attention
from linvit.attention.ops.functional import join_heads, split_heads

HEADS = 2
EPS = 1e-6
PACKED = Packed([(7, 7), (1, 1), (3, 5), (7, 7), (2, 67)])  # of one chunk and of several
CASES = {  # queries, keys, channels of keys and of values, dtype
    "elu 49 49 32 32 bfloat16": {"phi": "elu", "eps": EPS},
    "elu 130 70 8 8 float32": {"phi": "elu", "eps": EPS, "turns": "shared", "weights": True},
    "elu 49 70 8 24 float32": {"phi": "elu", "eps": EPS, "turns": "heads", "difference": 8**-0.5},
    "elu 20 30 96 64 float16": {"phi": "elu", "eps": EPS},
    "relu 1 49 8 24 float32": {"phi": "relu", "eps": 0.1, "relu_eps": 0.01, "shift": True},
    "relu 33 3 128 128 float32": {"phi": "relu", "eps": 0.1, "relu_eps": 0.01},
    "exp 70 97 8 8 float32": {"phi": "exp"},
    "softmax 70 130 8 16 float32": {"phi": "softmax"},
    "softmax 20 130 8 8 float32 masked": {"phi": "softmax"},
    "softmax 20 130 8 8 float32 large": {"phi": "softmax"},
    "elu 20 97 8 8 float32 masked": {"phi": "elu"},
    "focused 70 49 24 24 float32": {"phi": "focused", "eps": EPS, "power": 3.0, "shift": True, "factor": True},
    "focused 49 49 32 8 bfloat16": {"phi": "focused", "eps": EPS, "power": 3.0, "relu_eps": EPS, "factor": True},
    "focused 33 20 8 8 float32 whole": {"phi": "focused", "eps": EPS, "power": 3.0, "shift": True, "factor": True},
    "focused 20 70 8 8 float32": {"phi": "focused", "eps": EPS, "power": 2.5, "relu_eps": 0.1, "all_heads": False},
    "elu 248 248 32 32 bfloat16 packed": {"phi": "elu", "eps": 0.1, "mean": True},
    "elu 248 248 8 8 float32 packed": {"phi": "elu", "eps": 0.1, "mean": True, "turns": "heads", "weights": True},
    "elu 248 248 8 24 float32 packed": {"phi": "elu", "eps": EPS, "turns": "shared", "difference": 8**-0.5},
    "relu 248 248 8 8 float16 packed": {"phi": "relu", "eps": 0.1, "shift": True},
    "exp 248 248 8 8 float32 packed": {"phi": "exp"},
    "softmax 248 248 8 8 float32 packed": {"phi": "softmax"},
    "focused 248 248 8 8 float32 packed": {"phi": "focused", "eps": 0.1, "mean": True, "power": 3.0, "factor": True},
    "focused 248 248 8 8 float32 packed whole": {"phi": "focused", "power": 3.0, "relu_eps": 0.1, "shift": True},
    "focused 248 248 24 8 float32 packed whole": {"phi": "focused", "eps": EPS, "power": 3.0, "factor": True},
    "focused 248 248 8 8 float32 packed heads": {"phi": "focused", "eps": 1.0, "power": 2.5, "all_heads": False},
}
MECHANISMS: dict[str, dict[str, Any]] = {
    "linear": {},
    "efficient": {},
    "focused": {"key_dim": 8},
    "slab": {},
    "mala": {},
    "rala": {},
    "mlla": {},
}


def plain(q: Tensor, k: Tensor, v: Tensor, formula: Formula, packed: Packed | None = None) -> Tensor:
    """The formula by the operators of torch, naively; of packed images one after the other."""
    if packed is not None:
        places = map(slice, packed.offsets[:-1], packed.offsets[1:])
        return torch.cat([plain(*(x[:, :, at] for x in (q, k, v)), part(formula, at)) for at in places], 2)
    heads = q.shape[1]
    if formula.shift is not None:
        k = k + split_heads(formula.shift[None], heads)
    if formula.phi == "softmax":
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)

    def features(x: Tensor) -> Tensor:
        if formula.phi == "elu":
            return torch.where(x > 0, x + 1, x.clamp_max(0).exp())
        if formula.phi == "exp":
            return x.exp()
        u = F.relu(x) + formula.relu_eps
        if formula.phi == "relu":
            return u
        u = join_heads(u) * (1 if formula.factor is None else formula.factor)
        u = u if formula.all_heads else u.unflatten(-1, (heads, -1))
        powers = u**formula.power
        y = powers / powers.norm(dim=-1, keepdim=True).clamp_min(1e-300) * u.norm(dim=-1, keepdim=True)
        return split_heads(y if formula.all_heads else y.flatten(-2), heads)

    def turned(x: Tensor, turns: Tensor | None) -> Tensor:
        if turns is None:
            return x
        return torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.view_as_complex(turns)
        ).flatten(-2)

    q, k = features(q), features(k)
    k = k if formula.weights is None else k * formula.weights[..., None]
    mixed = turned(q, formula.turns[0]) @ (turned(k, formula.turns[1]).mT @ v)
    weight = q @ k.sum(-2, keepdim=True).mT
    if not formula.difference:
        return mixed / (weight + formula.eps * (k.shape[-2] if formula.mean else 1))
    z = weight * formula.difference / k.shape[-2]
    return (1 + 1 / (z + formula.eps)) * (formula.difference / k.shape[-2]) * mixed - z * v.mean(-2, keepdim=True)


def part(formula: Formula, at: slice) -> Formula:
    """The formula of some of the tokens."""
    return formula._replace(
        shift=None if formula.shift is None else formula.shift[at],
        weights=None if formula.weights is None else formula.weights[..., at],
        turns=tuple(None if x is None else x[..., at, :, :] for x in formula.turns),
    )


def angles(tokens: int, width: int, kind: str) -> Tensor:
    """Cosines and sines of random angles."""
    turn = 6 * torch.rand(*((HEADS,) if kind == "heads" else ()), tokens, width // 2)
    return torch.stack([turn.cos(), turn.sin()], dim=-1)


def case(name: str) -> tuple[list[Tensor], list[Tensor], Callable[[Any, list[Tensor]], Tensor]]:
    """Queries, keys and values; other tensors with a gradient; and a function of both and of what computes."""
    _, queries, keys, width, value_width, dtype, *_ = name.split()
    options = dict(CASES[name])
    tokens = ((int(queries), int(width)), (int(keys), int(width)), (int(keys), int(value_width)))
    # as a host's projections give them, (B, N, h, d) in memory
    own = [torch.randn(1, count, HEADS, wide).transpose(1, 2).to(getattr(torch, dtype)) for count, wide in tokens]
    if "masked" in name:  # the first chunk of keys whole
        own[1][:, :, :70] = -math.inf
    if "large" in name:  # the first chunk of keys alone
        own[1][:, :, :70] *= 60
    if "turns" in options:
        kind = options.pop("turns")
        options["turns"] = tuple(angles(count, int(width), kind) for count in (int(queries), int(keys)))
    shapes = {
        "weights": (1, HEADS, int(keys)),
        "shift": (int(keys), HEADS * int(width)),
        "factor": (HEADS * int(width),),
    }
    names = [key for key in shapes if options.pop(key, None)]
    extras = [torch.rand(shapes[key]) + 0.5 for key in names]

    def compute(function: Any, leaves: list[Tensor]) -> Tensor:
        turns = tuple(x.to(leaves[-1].dtype if names else leaves[0].dtype) for x in options.get("turns", ()))
        given = options | dict(zip(names, leaves[3:], strict=True)) | ({"turns": turns} if turns else {})
        return function(*leaves[:3], Formula(**given), *((PACKED,) if "packed" in name else ()))

    return own, extras, compute


def errors(found: list[Tensor], true: list[Tensor]) -> list[float]:
    """Of outputs and gradients, relative to the largest entry; 1e-3 of the largest of all counts as such."""
    least = 1e-3 * max(x.abs().max() for x in true)
    return [((x - y).abs().max() / y.abs().max().clamp_min(least)).item() for x, y in zip(found, true, strict=True)]


def formulas() -> Iterator[dict[str, Any]]:
    """Each case, with its launches: programs, and sums of torch."""
    for name in CASES:
        torch.manual_seed(0)
        own, extras, compute = case(name)
        results, launches = [], []
        programs = 1 if "whole" in name else linear.PROGRAMS  # of which fewer would fill a device
        counting = mock.patch.object(linear, "launch", wraps=linear.launch)
        with mock.patch.object(linear, "PROGRAMS", programs), counting as launch:
            for function, dtype in ((linear_attention, None), (plain, torch.float64)):
                leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (*own, *extras)]
                out = compute(function, leaves)
                launches.append(launch.call_count)
                torch.manual_seed(1)
                gradient, sums = torch.randn(out.shape).to(out.dtype), mock.Mock(wraps=Tensor.sum)
                with mock.patch.object(Tensor, "sum", lambda *given, sums=sums, **options: sums(*given, **options)):
                    out.backward(gradient)
                launches.append(launch.call_count - launches[-1] + sums.call_count)
                results.append([out.detach().double(), *(x.grad.double() for x in leaves)])
        yield {"name": name, "errors": errors(*results), "launches": launches[:2]}


def alone(mechanism: Attention, rows: list[Tensor], grid: Grid | Packed) -> Tensor:
    """What a mechanism computes; of packed images from those of each size alone."""
    return grid.map_images(mechanism, *rows) if isinstance(grid, Packed) else mechanism(*rows, grid)


def mechanisms() -> Iterator[dict[str, Any]]:
    """Each mechanism by its kernel, beside itself in float64, with a prefix and gradients of its parameters."""
    for (name, options), packed in product(MECHANISMS.items(), (False, True)):
        torch.manual_seed(0)
        grid = Packed(PACKED.sizes, num_prefix=1) if packed else Grid((4, 5), num_prefix=1)
        kernel = create_attention(name, dim=16, num_heads=2, grid=Grid((4, 5), num_prefix=1), **options)
        with torch.no_grad():
            for parameter in kernel.parameters():
                parameter.normal_(std=0.3)
        results = []
        given = [torch.randn(2 - packed, 2, grid.num_queries, 8) for _ in range(3)]
        for kind, dtype in (("triton", torch.float32), ("torch", torch.float64)):
            kernel.to(dtype).zero_grad()
            kernel.attention_kernel = kind
            leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in given]
            with mock.patch.object(linear, "launch", wraps=linear.launch) as launch:
                out = kernel(*leaves, grid) if kind == "triton" else alone(kernel, leaves, grid)
            assert launch.called == (kind == "triton")
            torch.manual_seed(1)
            out.backward(torch.randn(out.shape).to(dtype))
            gradients = (x.grad.double().clone() for x in (*leaves, *kernel.parameters()))
            results.append([out.detach().double(), *gradients])
        yield {"name": f"{name}{' packed' * packed}", "errors": errors(*results)}


def leaks() -> dict[str, Any]:
    """Bits of images in a pack that change with another image: 0 if there is none."""
    first = PACKED.lengths[0] + PACKED.lengths[1]
    wrong = []
    for phi, third in (("elu", {"difference": 0.3}), ("softmax", {}), ("focused", {"power": 3.0, "mean": True})):
        torch.manual_seed(0)
        given, weight = [torch.randn(1, HEADS, PACKED.num_queries, 8) for _ in range(3)], torch.randn(8)
        found = []
        for last in (1.0, math.nan):
            leaves = [x.clone() for x in given]
            for x in leaves:
                x[:, :, :first] *= last
                x.requires_grad_()
            out = linear_attention(*leaves, Formula(phi, eps=EPS, **third), PACKED)
            out.backward((out.detach() * weight).contiguous())
            found.append([x[:, :, first:] for x in (out.detach(), *(x.grad for x in leaves))])
        wrong += [float(not torch.equal(x, y)) for x, y in zip(*found, strict=True)]
    return {"name": "leaks", "errors": wrong}


def on_a_device(device: str, name: str, dtype: torch.dtype, packed: bool = False) -> list[float]:
    """Errors of a mechanism by its kernel, of output and gradients, against itself in float64 on the CPU."""
    nominal = Grid((14, 15), num_prefix=1)
    grid = Packed([*PACKED.sizes, (56, 56)], num_prefix=1) if packed else nominal
    exact = create_attention(name, dim=48, num_heads=2, grid=nominal)
    kernel = copy.deepcopy(exact).to(device, dtype)
    exact, kernel.attention_kernel = exact.double(), "triton"
    exact.load_state_dict(kernel.state_dict())
    given = [torch.randn(2 - packed, 2, grid.num_queries, 24).to(dtype) for _ in range(3)]
    weight, results = torch.randn(2 - packed, 2, grid.num_queries, 24).to(dtype), []
    for mechanism, place in ((kernel, {"device": device}), (exact, {"dtype": torch.float64})):
        leaves = [x.detach().to(**place).requires_grad_() for x in given]
        out = mechanism(*leaves, grid) if mechanism is kernel else alone(mechanism, leaves, grid)
        out.backward(weight.to(**place))
        found = out.detach(), *(x.grad for x in (*leaves, *mechanism.parameters()))
        results.append([x.double().cpu() for x in found])
    return errors(*results)


def compiled() -> dict[str, Any]:
    """A layer's mechanism compiled as one graph, with its gradients."""
    grid = Grid((3, 3))
    mechanism: nn.Module = create_attention("linear", dim=16, num_heads=2, grid=grid)
    mechanism.attention_kernel = "triton"
    results = []
    given = [torch.randn(1, 2, 9, 8) for _ in range(3)]
    for call in (torch.compile(mechanism, backend="aot_eager", fullgraph=True), mechanism):
        leaves = [x.clone().requires_grad_() for x in given]
        out = call(*leaves, grid)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    return {"name": "compiled", "errors": errors(*results)}


def not_a_number() -> dict[str, Any]:
    """NaN in a query is NaN in its output, and in a key in all."""
    q, k = torch.randn(2, 1, 1, 4, 8)
    broken = q.clone()
    broken[0, 0, 1, 2] = math.nan
    wrong = []
    for phi in ("elu", "relu", "softmax", "exp", "focused"):
        formula = Formula(phi, power=3.0)
        hit = [
            linear_attention(*given, k, formula).isnan().all(-1).flatten().tolist()
            for given in ((broken, k), (k, broken))
        ]
        wrong.append(float(hit != [[False, True, False, False], [True] * 4]))
    return {"name": "nan", "errors": wrong}


def far_apart() -> dict[str, Any]:
    """Three tokens of which the last lies behind 2**31 numbers, as in slices of a large map."""
    there = torch.empty(2**31 + 8, dtype=torch.float16).as_strided((1, 1, 3, 8), (0, 0, 2**30, 1))
    here = there.copy_(torch.randn(3, 8)).clone()
    found = [linear_attention(x, x, x, Formula("elu")) for x in (there, here)]
    return {"name": "far apart", "errors": errors(found[:1], found[1:])}


def main() -> None:
    """Prints all, or with `--compiled` what a compiled mechanism computes."""
    for found in (
        [compiled()] if "--compiled" in sys.argv else (*formulas(), *mechanisms(), leaks(), not_a_number(), far_apart())
    ):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
