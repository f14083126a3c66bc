"""A mechanism under test and its inputs, all of it reproducible."""

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention, Grid
from linvit.errors import UserError
from linvit.registry import Spec, attentions
from linvit.signatures import parameters_of
from linvit.testing.report import Advice

NOMINAL = Grid((14, 14))
EXACT = 1e-9
"""Relative tolerance in float64 of results that differ in the order of sums only: these differ by 1e-15 and, for
inverses by iteration, by six digits more."""
HALF = Advice(
    "run the delicate part in float32: decorate forward, or a method (self, q, k, v), with @linvit.full_precision"
)


class Inputs(NamedTuple):
    """The inputs of a mechanism.

    Attributes:
        q: Queries (B, h, N, dk).
        k: Keys (B, h, M, dk); q itself where the mechanism projects "qv".
        v: Values (B, h, M, d).
        extra: The layer's input `x` (B, N, C), where the mechanism takes it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    extra: dict[str, Tensor]

    def __call__(self, mechanism: Callable[..., Tensor], grid: Grid) -> Tensor:
        """Calls the mechanism on these inputs."""
        return mechanism(self.q, self.k, self.v, grid, **self.extra)

    @property
    def named(self) -> dict[str, Tensor]:
        """Returns the distinct tensors by name."""
        keys = {} if self.k is self.q else {"k": self.k}
        return {"q": self.q, **keys, "v": self.v, **self.extra}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """Returns the same inputs with each tensor changed."""
        q = change(self.q)
        k = q if self.k is self.q else change(self.k)
        return Inputs(q, k, change(self.v), {name: change(tensor) for name, tensor in self.extra.items()})

    def replace(self, name: str, tensor: Tensor) -> "Inputs":
        """Returns the same inputs with another tensor for a name in `named`."""
        if name in self.extra:
            return self._replace(extra={**self.extra, name: tensor})
        if name == "q" and self.k is self.q:
            return self._replace(q=tensor, k=tensor)
        return Inputs(**{**self._asdict(), name: tensor})


def flat(x: Tensor) -> Tensor:
    """Makes every token equal to the first, as in a blank image: (B, h, N, d) or (B, N, C)."""
    return x[..., :1, :].expand_as(x)


def normal(*shape: int, seed: int) -> Tensor:
    """Returns reproducible normal numbers in float64, whatever the state of the global generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(
    mechanism: Attention,
    grid: Grid,
    *,
    batch: int = 2,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Returns random q, k, v (and x, where taken) of the shapes that a mechanism declares."""
    heads = mechanism.num_heads

    def make(seed: int, *shape: int) -> Tensor:
        return normal(batch, *shape, seed=seed).to(dtype)

    q = make(1, heads, grid.num_queries, mechanism.key_dim)
    k = q if mechanism.projections == "qv" else make(2, heads, grid.num_keys, mechanism.key_dim)
    v = make(3, heads, grid.num_keys, mechanism.head_dim)
    if not mechanism.takes_input:
        return Inputs(q, k, v, {})
    # (B, h, N, d) -> (B, N, C): where the query is the layer's input, x is the same tokens with the heads merged.
    x = q.transpose(1, 2).flatten(2) if mechanism.projections == "kv" else make(4, grid.num_queries, mechanism.dim)
    return Inputs(q, k, v, {"x": x})


class Subject:
    """A mechanism under test, of which it builds instances with changed initial values.

    Args:
        spec: A name, a mapping with `name` and options, or a class.
        dim: Channels C of the instances.
        num_heads: Heads h.
        quick: Whether checks leave out their largest sizes.

    Attributes:
        hosted: The spec under which `AttentionLayer` finds the mechanism; None for a class that no path leads to.
        options: The options that the spec sets.
        parameters: Names and defaults of the constructor's arguments.

    Raises:
        UserError: If there is no such mechanism.
    """

    def __init__(self, spec: Spec | type[Attention], dim: int, num_heads: int, quick: bool) -> None:
        self.spec = spec
        self.dim = dim
        self.num_heads = num_heads
        self.quick = quick
        self.hosted: Spec | None
        self.options: dict[str, Any]
        self._create: Callable[..., Any]
        if isinstance(spec, type):
            if not issubclass(spec, Attention):
                raise UserError(
                    f"{spec.__name__} is not a subclass of linvit.Attention, so there is no contract to hold it to"
                )
            constructor: Callable[..., Any] = spec
            self._create, self.options = spec, {}
            self.hosted = str(self) if _found(spec) else None
        else:
            name, self.options = attentions.parse(spec)
            constructor = attentions.get(name)
            self._create, self.hosted = partial(attentions.create, spec), spec
        self.parameters = parameters_of(constructor)

    def __str__(self) -> str:
        if isinstance(self.spec, str):
            return self.spec
        if isinstance(self.spec, Mapping):
            return ", ".join(str(value) if key == "name" else f"{key}={value}" for key, value in self.spec.items())
        return f"{self.spec.__module__}:{self.spec.__qualname__}"

    def takes(self, option: str) -> bool:
        """Returns whether the constructor has a parameter of this name."""
        return option in self.parameters

    def build(self, grid: Grid = NOMINAL, dtype: torch.dtype = torch.float64, seed: int = 0, **host: int) -> Attention:
        """Builds an instance in evaluation mode. The same seed gives the same parameters."""
        context = {"dim": self.dim, "num_heads": self.num_heads, "grid": grid, **host}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built: Attention = self._create(**context)
        disturb(built)
        return built.to(dtype).eval()


def _found(constructor: type) -> bool:
    """Returns whether `package.module:Class` leads to a class: not if it is local, or its module has no name."""
    found: Any = sys.modules.get(constructor.__module__)
    for part in constructor.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is constructor


@torch.no_grad()
def disturb(module: nn.Module) -> None:
    """Changes every parameter by a tenth of its size, or by 0.1 where all is 0: a zero weight would hide its effect."""
    for seed, parameter in enumerate(module.parameters()):
        size = float(parameter.double().square().mean().sqrt()) or 1.0
        parameter.add_((0.1 * size * normal(*parameter.shape, seed=100 + seed)).to(parameter.dtype))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Returns the largest absolute difference over the largest entry; NaN if there is one anywhere."""
    got, want = got.detach().double(), want.detach().double()
    if got.shape != want.shape:
        return math.nan
    return float((got - want).abs().max() / want.abs().max().clamp_min(torch.finfo(torch.float64).tiny))


def shown(grid: Grid) -> str:
    """Writes a grid as "14x14", "14x14 + 2 prefix", "14x14 reduced to 7x7"."""
    text = f"{grid.size[0]}x{grid.size[1]}"
    if grid.kv_size is not None:
        text += f" reduced to {grid.kv_size[0]}x{grid.kv_size[1]}"
    return text + (f" + {grid.num_prefix} prefix" if grid.num_prefix else "")
