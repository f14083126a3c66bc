"""Records the inputs of each mechanism of a model in a forward pass, to compute its matrix and rank afterwards."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linvit.analysis.attention_matrix import attention_factors, attention_matrix, matrix_parts
from linvit.attention.base import Attention, Grid
from linvit.backbones.replace_attention import replace_attention
from linvit.errors import UserError
from linvit.layers.stripes import StripeBranch
from linvit.layers.windows import WindowAttention


class Call(NamedTuple):
    """One forward call of a mechanism, for the first image only, or its first window, unless all samples are kept.

    Attributes:
        mechanism: The mechanism that was called.
        q: Queries (1, h, N, dk).
        k: Keys (1, h, M, dk).
        v: Values (1, h, M, d).
        grid: Their grid.
        bias: Position bias, if the mechanism takes one.
        x: The layer's input (1, N, C), if the mechanism takes it.
        layout: Division of the image into windows or stripes: the size (H, W) of the whole map, and the patch
            at each position of each window, (n, N), -1 for padding.
    """

    mechanism: Attention
    q: Tensor
    k: Tensor
    v: Tensor
    grid: Grid
    bias: Tensor | None = None
    x: Tensor | None = None
    layout: tuple[tuple[int, int], Tensor] | None = None

    def first(self) -> "Call":
        """Returns the call of the first sample only."""
        return self._replace(**{name: _kept(value, 1) for name, value in self._asdict().items()})

    def matrix(self) -> Tensor:
        """Returns the equivalent matrix in float64, (h, N, M), or (h, d, N, M) if the mechanism is channelwise."""
        values = None if self.mechanism.facts.linear_in_values else self.v
        return attention_matrix(self.mechanism, self.q, self.k, self.grid, v=values, bias=self.bias, x=self.x)[0]

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Returns thin factors of the matrix in float64, (h[, d], N, r) and (h[, d], M, r), if there are any."""
        found = attention_factors(self.mechanism, self.q, self.k, self.grid, bias=self.bias)
        return None if found is None else (found[0][0], found[1][0])

    def state(self) -> int:
        """Returns bytes in float32 of the state that summarises all keys and values, for any queries, in all windows.

        It is the size that the mechanism declares (`state_size`). Else with thin factors of r columns it is
        `sum_j right_j v_j^T` and `sum_j right_j`, r (d + 1) numbers per head; without, or where they are fewer, the
        keys and values. A convolution has no additional state.
        """
        if self.mechanism.facts.state_size is not None:
            return 4 * self.mechanism.facts.state_size * len(self.k)
        kernel = matrix_parts(self.mechanism).get("kernel", self.mechanism)
        first = self.first()
        factors = attention_factors(kernel, first.q, first.k, self.grid, bias=first.bias)
        numbers = first.k.numel() + first.v.numel()
        if factors is not None:
            columns = factors[1].numel() // factors[1].shape[-2]
            numbers = min(numbers, columns * (2 if kernel.facts.channelwise else first.v.shape[-1] + 1))
        return 4 * numbers * len(self.k)


class Recorder:
    """Records the inputs of every mechanism of a model, from its creation to `close()` or the end of a `with` block.

    Hooks are on mechanisms, not on layers, and only while a recorder is open, so they do not slow down a model that is
    not recorded. `torch.compile` drops hooks: record the model before it is compiled, or under
    `torch.compiler.set_stance("force_eager")`.

    Args:
        model: Any module that contains mechanisms of linvit.
        samples: Number of samples of the batch to keep, each window counted; None keeps all.

    Attributes:
        calls: The latest call of each mechanism, by the module path of its layer.

    Raises:
        UserError: If the model contains no mechanism of linvit, as a timm model with its own attention.

    Example:
        >>> model = linvit.create_backbone("deit_nano", attention="focused")
        >>> with Recorder(model) as recorder:
        ...     model(torch.randn(1, 3, 32, 32))
        >>> recorder.calls["blocks.0.attn"].matrix().shape  # heads, channels, queries, keys
        torch.Size([3, 32, 64, 64])
    """

    def __init__(self, model: nn.Module, samples: int | None = 1) -> None:
        found = mechanisms(model)
        if not found:
            raise UserError(
                f"{type(model).__name__} contains no attention mechanism of linvit, so there is nothing to record. "
                f"Replace its attention first, as by linvit.replace_attention(model, 'softmax'), which keeps the "
                f"weights, or build it by linvit.create_backbone(..., attention='softmax')"
            )
        self.calls: dict[str, Call] = {}
        self._samples = samples
        self._layouts: dict[str, tuple[tuple[int, int], Tensor]] = {}
        hosts = {name: model.get_submodule(name) for name in found}
        self._hooks = [
            mechanism.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
            for layer, mechanism in found.items()
        ]
        self._hooks += [
            host.register_forward_pre_hook(self._layout_of(layer), with_kwargs=True)
            for layer, host in hosts.items()
            if isinstance(host, WindowAttention | StripeBranch)
        ]

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the hooks; the recorded calls are kept."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: str) -> Callable[[Attention, tuple[Any, ...], dict[str, Any]], None]:
        def record(mechanism: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = dict(zip(("q", "k", "v", "grid"), args, strict=False)) | kwargs
            kept = {name: _kept(value, self._samples) for name, value in given.items()}
            self.calls[layer] = Call(mechanism, **kept, layout=self._layouts.get(layer))

        return record

    def _layout_of(self, layer: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def record(host: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            grid: Grid = kwargs["grid"] if "grid" in kwargs else args[-1]
            self._layouts[layer] = grid.size, host.layout(grid.size)

        return record


def mechanisms(model: nn.Module) -> dict[str, Attention]:
    """Returns all mechanisms of a model by the module path of their layer, such as "blocks.0.attn"."""
    return {
        name.removesuffix(".mechanism"): module
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    }


def observable(network: nn.Module, img_size: int | Sequence[int]) -> nn.Module:
    """Returns a copy to record from: in evaluation mode, not compiled, without other hooks, with the network's weights.

    If the network has no mechanism of linvit, the attention of its timm model is replaced by linvit's softmax, which
    computes the same from the same projections. Raises a `UserError` that names the token mixer if it has no attention.
    """
    memo: dict[int, object] = {id(tensor): tensor for tensor in chain(network.parameters(), network.buffers())}
    for module in network.modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks"):  # the model's own hooks, which tell a timm model its grid, are copied with it
                own = {key: hook for key, hook in hooks.items() if type(hook).__module__.startswith("linvit.backbones")}
                memo[id(hooks)] = OrderedDict(copy.deepcopy(own, memo))
    copied = copy.deepcopy(network, memo).eval()
    if not mechanisms(copied):
        backbone = getattr(copied, "backbone", copied)
        replace_attention(backbone, "softmax", img_size)
        backbone.eval()
    return copied


@torch.no_grad()
def observe(network: nn.Module, image: Tensor) -> dict[str, Call]:
    """Returns the input of each attention layer for one image (1, 3, H, W), by the layer's name; see `observable`."""
    copied = observable(network, tuple(image.shape[-2:]))
    with Recorder(copied, samples=None) as recorder:
        copied(image)
    return {layer_name(layer): call for layer, call in recorder.calls.items()}


def layer_name(layer: str) -> str:
    """Returns the name of a layer in curves and tables, the same within a network and for the backbone alone."""
    return layer.removeprefix("network.").removeprefix("backbone.")


def _kept(value: Any, samples: int | None) -> Any:
    """Returns a copy of the first samples of a tensor; other values unchanged."""
    return value[:samples].detach().clone() if isinstance(value, Tensor) else value
