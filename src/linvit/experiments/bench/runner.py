"""A module that runs forward, and forward and backward, on some device in some precision, compiled or not."""

import copy
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Settings(NamedTuple):
    """How modules run.

    Attributes:
        device: "cpu", or a CUDA device.
        dtype: Of weights and inputs; under `autocast` that of autocast, with weights in float32.
        autocast: Whether the passes run under autocast.
        compile: Whether modules are compiled (`torch.compile` with static shapes).
        backward: Whether the backward pass is measured, too.
        batch: Images.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    compile: bool = False
    backward: bool = True
    batch: int = 1

    @property
    def weights(self) -> torch.dtype:
        """The data type of the weights."""
        return torch.float32 if self.autocast else self.dtype


class Candidate(NamedTuple):
    """A module at one size.

    Attributes:
        name: Of the module.
        size: Patch grid or image, (H, W).
        amount: Tokens or pixels.
        build: Makes the module, its inputs and keyword arguments for any size. May raise `UserError`.
    """

    name: str
    size: tuple[int, int]
    amount: int
    build: Callable[[tuple[int, int]], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


class Runner:
    """A module with its inputs, ready to run: in evaluation mode forward, in training mode forward and backward.

    Args:
        module: Its weights are moved to the device.
        inputs: What it is called with; tensors of floating point are moved to the device.
        options: Keyword arguments of the call.
        settings: How it runs.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], settings: Settings) -> None:
        self.settings = settings
        self.trained = module.to(settings.device, settings.weights).train()
        shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self.evaluated = copy.deepcopy(module, shared).eval()  # the same weights: switching a mode takes time
        self.inputs, self.options = inputs, options
        self.leaves = [x for x in (*inputs, *options.values()) if isinstance(x, Tensor) and x.requires_grad]
        self.leaves += [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.gradient: Tensor | None = None
        self.calls = {True: self._call(self.trained), False: self._call(self.evaluated)}

    def _call(self, module: nn.Module) -> Callable[[], Tensor]:
        def call() -> Tensor:
            return module(*self.inputs, **self.options)  # type: ignore[no-any-return]

        if not self.settings.compile:
            return call
        # torch.compile keeps what it compiled by code object, and gives up after a few: each module gets its own
        code = call.__code__.replace(co_name=f"call_{id(module)}")
        own = types.FunctionType(code, call.__globals__, closure=call.__closure__)
        return torch.compile(own, dynamic=False)

    def _precision(self) -> AbstractContextManager[Any]:
        if not self.settings.autocast:
            return nullcontext()
        return torch.autocast(torch.device(self.settings.device).type, self.settings.dtype)

    def forward(self) -> Tensor:
        """A forward pass in evaluation mode, without gradients."""
        with torch.no_grad(), self._precision():
            return self.calls[False]()

    def training_forward(self) -> Tensor:
        """A forward pass in training mode, with gradients."""
        with self._precision():
            out = self.calls[True]()
        if self.gradient is None:
            self.gradient = torch.randn_like(out)
        return out

    def forward_backward(self) -> None:
        """A forward and a backward pass, for the gradients of inputs and weights, which are freed again."""
        self.training_forward().backward(self.gradient)
        for leaf in self.leaves:
            leaf.grad = None
