"""A mechanism under test and its inputs."""

import sys
from collections.abc import Callable, Iterator, Set
from typing import Any, ClassVar

import torch
from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.errors import UserError
from linvit.registry import Spec, attentions
from linvit.testing.numbers import gradients_of, normal, trainable
from linvit.testing.subject import Given, Subject

NOMINAL, SECOND = Grid((14, 14)), Grid((7, 9))
NEIGHBOURS = (1.0, 2.0**-4, 2.0**4, 1.0)  # scales of the samples of a batch; the last sample is flat


class Inputs(Given):
    """The inputs of a mechanism on a grid, by name.

    Queries `q` (B, h, N, dk); keys `k` (B, h, M, dk), which are q itself where the mechanism projects "qv";
    values `v` (B, h, M, d); other inputs that it takes, such as the layer's input `x` (B, N, C).
    """

    def __init__(self, grid: Grid, **named: Tensor) -> None:
        super().__init__(**named)
        self.grid = grid

    def __getitem__(self, name: str) -> Tensor:
        """Returns queries, keys or values."""
        return self.named["q" if name == "k" and "k" not in self.named else name]

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
        """Arguments of the call, positional and by name."""
        return (self["q"], self["k"], self["v"], self.grid), {
            name: x for name, x in self.named.items() if name not in ("q", "k", "v")
        }

    def __call__(self, model: Callable[..., Tensor]) -> Tensor:
        """Calls the mechanism on these inputs."""
        given, extra = self.arguments
        return model(*given, **extra)


def flat(x: Tensor) -> Tensor:
    """Makes every token equal to the first, as in a uniform image: (B, h, N, d) or (B, N, C)."""
    return x[..., :1, :].expand_as(x)


def inputs(mechanism: Attention, grid: Grid, *, batch: int = 2, dtype: torch.dtype = torch.float64) -> Inputs:
    """Returns random q, k, v (and x, if the mechanism takes it) of the shapes that it declares."""
    heads = mechanism.key_heads

    def make(seed: int, *shape: int) -> Tensor:
        return normal(batch, *shape, seed=seed).to(dtype)

    given = {"q": make(1, heads, grid.num_queries, mechanism.key_dim)}
    if mechanism.host.project != "qv":
        given["k"] = make(2, heads, grid.num_keys, mechanism.key_dim)
    given["v"] = make(3, mechanism.num_heads, grid.num_keys, mechanism.head_dim)
    if mechanism.host.input:
        # (B, h, N, d) -> (B, N, C): where the query is the layer's input, x is the same tokens with the heads merged.
        merged = mechanism.host.project == "kv"
        given["x"] = given["q"].transpose(1, 2).flatten(2) if merged else make(4, grid.num_queries, mechanism.input_dim)
    return Inputs(grid, **given)


class AttentionSubject(Subject):
    """Mechanism under test with C = `dim` channels; `hosted` is its spec for `AttentionLayer`, if any."""

    arguments: ClassVar = {"dim": "channels", "num_heads": "heads", "grid": "positions of the tokens"}
    supplied = ("dim", "num_heads", "grid")
    defaults: ClassVar = {"key_dim": None}  # dim / num_heads
    independent_in_training = True

    def __init__(self, spec: Spec | type[Attention], dim: int, num_heads: int, quick: bool) -> None:
        if isinstance(spec, type) and not issubclass(spec, Attention):
            raise UserError(f"{spec.__name__} is not a subclass of linvit.Attention, so it has no contract to check")
        super().__init__(spec, attentions, quick)
        self.dim = dim
        self.num_heads = num_heads
        by_path = not isinstance(spec, type) or _found(spec)
        self.hosted: Spec | None = (str(self) if isinstance(spec, type) else spec) if by_path else None
        self.picklable = by_path

    def create(self, size: Grid | None = None, **context: Any) -> Attention:
        """Builds an instance with its initial values."""
        built: Attention = self.construct(
            **{"dim": self.dim, "num_heads": self.num_heads, "grid": size or NOMINAL, **context}
        )
        return built

    def inputs(self, model: Attention, size: Grid | None = None, batch: int = 2) -> Inputs:
        """Returns random q, k, v (and x, if the mechanism takes it) in float64."""
        return inputs(model, size or NOMINAL, batch=batch)

    def neighbours(self, model: Attention) -> Inputs:
        """Returns samples of different scales; the tokens of the last one are equal."""
        scales = torch.tensor(NEIGHBOURS, dtype=torch.float64)
        given = inputs(model, NOMINAL, batch=len(scales)).map(lambda x: x * scales.view(-1, *[1] * (x.ndim - 1)))
        return given.map(lambda x: torch.cat([x[:-1], flat(x[-1:])]))

    def gradients(self) -> Iterator[tuple[dict[str, Tensor | None], Set[str]]]:
        """Yields the gradients of inputs and parameters in training."""
        model = self.build().train()
        given = inputs(model, NOMINAL).map(lambda x: x.requires_grad_())
        yield gradients_of(given(model), given.named | trainable(model)), set()


def _found(constructor: type) -> bool:
    """Returns True if `package.module:Class` leads to a class: not if it is local, or its module has no name."""
    found: Any = sys.modules.get(constructor.__module__)
    for part in constructor.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is constructor
