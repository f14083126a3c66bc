"""Finds the first layer of a network whose output or gradient is not finite."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from linvit.finite import is_finite, tensors


class NonFinite(NamedTuple):
    """Origin of a non-finite value."""

    where: str  # description with the name of the layer
    samples: list[int]  # affected samples of the batch; empty if unknown


class _FoundError(Exception):
    """Ends a forward pass."""

    def __init__(self, finding: NonFinite) -> None:
        self.finding = finding


def find_non_finite(network: nn.Module, loss: Callable[[], Tensor], batch_size: int) -> NonFinite | None:
    """Computes a loss (a scalar) and its gradient; finds the first layer whose output or gradient is not finite.

    A layer's gradient, with respect to its input and weights, counts if the gradient that the layer received is finite.
    Hooks are not called in compiled networks: call this under `torch.compiler.set_stance("force_eager")`.
    """
    owners: dict[Node, str] = {}  # operations of the backward pass and their layers

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(layer: nn.Module, args: Any, output: Any) -> None:
            called = f"layer '{name}' ({type(layer).__name__})" if name else f"the network ({type(layer).__name__})"
            for tensor in tensors(output):
                if not is_finite(tensor):
                    raise _FoundError(NonFinite(f"the output of {called}", bad_samples(tensor, batch_size)))
                _own(owners, tensor.grad_fn, called)

        return look

    hooks = [layer.register_forward_hook(hook(name)) for name, layer in network.named_modules()]
    try:
        value = loss()
    except _FoundError as found:
        return found.finding
    finally:
        for handle in hooks:
            handle.remove()
    if not is_finite(value):
        return NonFinite("the loss, computed from finite outputs", [])
    _own(owners, value.grad_fn, "the loss")
    return _backward(owners, value, [weight for weight in network.parameters() if weight.requires_grad])


def bad_samples(tensor: Tensor, batch_size: int) -> list[int]:
    """Returns the samples in which a tensor (B, ...) or (B * parts, ...) is not finite; empty for other shapes."""
    if not tensor.ndim or not len(tensor) or len(tensor) % batch_size:
        return []
    found: list[int] = (~tensor.detach().reshape(batch_size, -1).isfinite()).any(1).nonzero().flatten().tolist()
    return found


def _own(owners: dict[Node, str], last: Node | None, called: str) -> None:
    """Assigns to a layer all operations that led to its output and belong to no layer within it."""
    nodes = [last]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in owners:
            owners[node] = called
            nodes += [before for before, _ in node.next_functions]


def _backward(owners: Mapping[Node, str], loss: Tensor, weights: list[Tensor]) -> NonFinite | None:
    found: list[NonFinite] = []

    def hook(node: Node, called: str) -> Callable[[Any, Any], None]:
        def look(inputs: Any, outputs: Any) -> None:  # gradients with respect to both, of the forward pass
            if not found and is_finite(outputs) and not is_finite(inputs):
                found.append(NonFinite(f"the gradient of {called}, in {node.name()}", []))

        return look

    for node, called in owners.items():
        node.register_hook(hook(node, called))
    torch.autograd.grad(loss, weights, allow_unused=True)  # does not set `grad`
    return found[0] if found else None
