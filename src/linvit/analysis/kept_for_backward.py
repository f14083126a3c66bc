"""Memory that a forward pass keeps for its backward pass."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def kept_for_backward(work: Callable[[], Any], *modules: nn.Module) -> int:
    """Bytes of the tensors that autograd keeps from a forward pass until its backward pass.

    Each storage counts once, however many operators keep it or a part of it; inputs count where they are kept. What
    the modules own, their parameters and buffers, does not count.

    Args:
        work: A forward pass with gradients; called once. Its result must keep its graph alive.
        modules: Whose parameters and buffers do not count.
    """
    own = {
        tensor.untyped_storage().data_ptr()
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    saved: WeakSet[_Saved] = WeakSet()  # what a forward pass drops again is not kept

    def pack(tensor: Tensor) -> _Saved:
        held = _Saved(tensor)
        saved.add(held)
        return held

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda held: held.tensor):
        result = work()
    storages = [held.tensor.untyped_storage() for held in saved if held.tensor.layout == torch.strided]
    del result
    kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for place, size in kept.items() if place not in own)


class _Saved:
    """A tensor that autograd keeps as long as its graph lives."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
