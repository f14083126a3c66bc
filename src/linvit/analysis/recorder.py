"""Listening to mechanisms: what each received in a forward pass, for probing afterwards."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from linvit.analysis.attention_matrix import attention_factors, attention_matrix
from linvit.attention.base import Attention, Grid


class Call(NamedTuple):
    """One forward call of a mechanism, for the first image alone.

    Attributes:
        mechanism: Who was called.
        q: Queries (1, h, N, dk).
        k: Keys (1, h, M, dk).
        v: Values (1, h, M, d).
        grid: Their grid.
        bias: Position bias, if the mechanism takes one.
        x: The layer's input (1, N, C), if the mechanism takes it.
    """

    mechanism: Attention
    q: Tensor
    k: Tensor
    v: Tensor
    grid: Grid
    bias: Tensor | None = None
    x: Tensor | None = None

    def matrix(self) -> Tensor:
        """The equivalent matrix in float64, (h, N, M), or (h, d, N, M) if the mechanism is channelwise."""
        values = None if self.mechanism.probeable else self.v
        return attention_matrix(self.mechanism, self.q, self.k, self.grid, v=values, bias=self.bias, x=self.x)[0]

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Thin factors of the matrix in float64 if the mechanism has them.

        (h, N, r) and (h, M, r), or (h, d, N, r) and (h, d, M, r) if the mechanism is channelwise.
        """
        found = attention_factors(self.mechanism, self.q, self.k, self.grid, bias=self.bias)
        return None if found is None else (found[0][0], found[1][0])


class Recorder:
    """Keeps the inputs of every mechanism of a model from its creation to `close()`.

    Hooks sit on mechanisms, never on layers, and only while a recorder is open: a model that nobody looks at pays
    nothing.

    Args:
        model: Any module that contains mechanisms.

    Attributes:
        calls: The latest call of each mechanism, by the module path of its layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[str, Call] = {}
        self._hooks = [
            mechanism.register_forward_pre_hook(self._listener(layer), with_kwargs=True)
            for layer, mechanism in mechanisms(model).items()
        ]

    def close(self) -> None:
        """Takes the hooks away; the calls stay."""
        for hook in self._hooks:
            hook.remove()

    def _listener(self, layer: str) -> Callable[[Attention, tuple[Any, ...], dict[str, Any]], None]:
        def listen(mechanism: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = dict(zip(("q", "k", "v", "grid"), args, strict=False)) | kwargs
            self.calls[layer] = Call(mechanism, **{name: _first(value) for name, value in given.items()})

        return listen


def mechanisms(model: nn.Module) -> dict[str, Attention]:
    """All mechanisms of a model by the module path of their layer, such as "blocks.0.attn"."""
    return {
        name.removesuffix(".mechanism"): module
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    }


def _first(value: Any) -> Any:
    """The first image's share of a tensor; anything else as it is."""
    return value[:1].detach().clone() if isinstance(value, Tensor) else value
