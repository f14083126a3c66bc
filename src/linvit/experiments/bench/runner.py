"""A module that runs forward, forward and backward, or a step of training, on some device in some precision."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from linvit.attention.kernels.choice import set_attention_kernel
from linvit.errors import UserError
from linvit.tasks.execution import keep_attention_features

Mode = str
"""How a module is executed: "eager", as it is; "compiled", by `torch.compile` with static shapes, for each size again;
"no recompute", as it is, but its attention keeps for backward all that it would otherwise compute twice
(`recompute_attention=false` of a task); or a kernel of `attention_kernel`, such as "triton"."""
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
WITHOUT_KERNEL = ("eager", "compiled", "no recompute")


class Settings(NamedTuple):
    """Settings of the measured modules."""

    device: str = "cpu"  # or a CUDA device
    dtype: torch.dtype = torch.float32  # of weights and inputs; under autocast that of autocast
    autocast: bool = False  # weights are float32 then
    modes: tuple[Mode, ...] = ("eager",)  # of each module, side by side; eager first
    backward: bool = True  # also measured
    optimizer: bool = False  # a step of training: cross entropy, backward, AdamW
    batch: int = 1  # images

    @property
    def weights(self) -> torch.dtype:
        """The data type of the weights."""
        return torch.float32 if self.autocast else self.dtype

    @property
    def kernels(self) -> list[str]:
        """The modes that are kernels."""
        return [mode for mode in self.modes if mode not in WITHOUT_KERNEL]

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of the measured methods of `Runner`."""
        return ("forward", "training_step" if self.optimizer else "forward_backward")[: 1 + self.backward]


Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A module, its inputs and keyword arguments."""
Build = Callable[[tuple[int, int]], Built]
"""Makes these for a size (H, W), of patches or pixels, and may raise a `UserError`."""


class Runner:
    """A module with its inputs on the device, ready to run: forward in evaluation mode, all else in training mode."""

    def __init__(
        self,
        module: nn.Module,
        inputs: tuple[Any, ...],
        options: dict[str, Any],
        settings: Settings,
        mode: Mode = "eager",
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,  # each forward pass
    ) -> None:
        self.settings, self.mode, self.inputs, self.options, self.around = settings, mode, inputs, options, around
        if settings.kernels:
            set_attention_kernel(module, mode if mode in settings.kernels else "torch")
        if mode == "no recompute":
            keep_attention_features(module)
        self.trained = module.to(settings.device, settings.weights).train()
        shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self.evaluated = copy.deepcopy(module, shared).eval()  # the same weights: switching a mode takes time
        self.leaves = [x for x in (*inputs, *options.values()) if isinstance(x, Tensor) and x.requires_grad]
        self.leaves += [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.gradient: Tensor | None = None
        self._train, self._evaluate = self._call(self.trained), self._call(self.evaluated)
        if mode in settings.kernels:
            self._check_kernel()

    def _check_kernel(self) -> None:
        """Raises a `UserError` if no kernel runs, or outputs or gradients by it are not those of torch's operators."""
        found = []
        for kernel in ("torch", self.mode):
            set_attention_kernel(self.trained, kernel)
            out = self.training_forward()
            found.append([out, *torch.autograd.grad(out, self.leaves, self.gradient)])
        if torch.equal(found[0][0], found[1][0]):
            raise UserError("no kernel computes this: its options, its precision or heads so wide have none")
        tolerance = 1e-3 if self.settings.dtype == torch.float32 else 3e-2
        for x, y in zip(*found, strict=True):
            if not (error := float((x - y).detach().norm() / x.detach().norm())) < tolerance:  # also NaN
                raise UserError(
                    f"the kernel's values differ from torch's by {error:.1g}, and are not to be trusted here"
                )

    def _call(self, module: nn.Module) -> Callable[[], Tensor]:
        def call() -> Tensor:
            return module(*self.inputs, **self.options)  # type: ignore[no-any-return]

        # by default torch.compile keeps all compilations of a function, and gives up after a few sizes
        if self.mode != "compiled":
            return call
        return torch.compile(call, dynamic=False, isolate_recompiles=True)  # type: ignore[call-overload, no-any-return]

    @contextmanager
    def _precision(self) -> Iterator[None]:
        device = torch.device(self.settings.device).type
        autocast = torch.autocast(device, self.settings.dtype) if self.settings.autocast else nullcontext()
        with autocast, self.around():
            yield

    def forward(self) -> Tensor:
        """Returns a forward pass in evaluation mode, without gradients."""
        with torch.no_grad(), self._precision():
            return self._evaluate()

    def training_forward(self) -> Tensor:
        """Returns a forward pass in training mode, with gradients."""
        with self._precision():
            out = self._train()
        if self.gradient is None:
            self.gradient = torch.randn_like(out)
        return out

    def forward_backward(self) -> None:
        """A forward and a backward pass, for the gradients of inputs and weights, which are freed again."""
        self.training_forward().backward(self.gradient)
        for leaf in self.leaves:
            leaf.grad = None

    def training_step(self) -> None:
        """Forward, cross entropy with random classes (squares for outputs other than logits), backward, and AdamW."""
        with self._precision():
            loss = _loss(self._train())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW with a learning rate of 0: it does all its work and changes no weight."""
        return torch.optim.AdamW(self.trained.parameters(), lr=0.0, fused=True)


def _loss(out: Any) -> Tensor:
    """Returns a loss of logits (B, K), or of the tensors in any other output."""
    if isinstance(out, Tensor) and out.ndim == 2:
        return F.cross_entropy(out, torch.randint(out.shape[-1], out.shape[:1], device=out.device))
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()
