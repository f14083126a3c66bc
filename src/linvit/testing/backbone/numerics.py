"""Checks precisions, devices and training of a backbone: gradient checkpointing, stochastic depth, parameter groups."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import timm.optim
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from linvit.analysis.operations import kept_for_backward
from linvit.backbones.initialise import classifiers
from linvit.errors import UserError
from linvit.testing.backbone.images import CLASSES, BackboneSubject, images
from linvit.testing.numbers import EXACT, gradients_of, relative_error, sortable, trainable
from linvit.testing.report import Check, at, judged, message, not_supported, require

SCALES = {f"images of scale 2^{power}": 2.0**power for power in (-10, 0, 6)}
FLOAT32 = 1e-3
"""Allowed relative error of float32 against float64 for a network: float32's epsilon is 1e-7, and an inverse or a
normaliser near 0 in a few of dozens of blocks costs four digits."""


@torch.no_grad()
def float32_and_float64(subject: BackboneSubject) -> str:
    """Checks that both run, each in its own precision, and agree."""
    exact = subject.model(subject.given)
    model = subject.build(dtype=torch.float32)
    out = model(subject.given.float())
    for dtype, given in ((torch.float64, exact), (torch.float32, out)):
        require(given.dtype == dtype, f"{dtype} images give {given.dtype} logits".replace("torch.", ""))
    error = relative_error(out, exact)
    return judged(error, f"they differ by {error:.0e}", FLOAT32)


def autocast(dtype: torch.dtype) -> Callable[[BackboneSubject], str]:
    """Returns the check that autocast gives finite logits at any scale of images and, in bfloat16, finite gradients.

    Gradients in float16 are not checked: they need the loss scaling of a training loop.
    """

    def check(subject: BackboneSubject) -> str:
        model = subject.build(dtype=torch.float32).train()
        for name, scale in SCALES.items():
            with at(name), torch.autocast("cpu", dtype):
                out = model(scale * images(subject.size, dtype=torch.float32))
            require(out.isfinite().all(), f"{int((~out.isfinite()).sum())} of {out.numel()} logits not finite, {name}")
            if dtype == torch.bfloat16:
                weights = trainable(model)
                found = torch.autograd.grad(out.float().square().mean(), list(weights.values()), allow_unused=True)
                pairs = zip(weights, found, strict=True)
                lost = [weight for weight, x in pairs if x is not None and not x.isfinite().all()]
                require(not lost, f"gradients of {', '.join(lost[:8])} not finite, {name}")
        return ", ".join(SCALES)

    return check


@torch.no_grad()
def devices(subject: BackboneSubject) -> str:
    """Checks that the model can be built on the meta device and runs there, and that `.to` moves every tensor."""
    outside = [name for module in subject.model.modules() for name in _strays(module)]
    require(not outside, f"tensors that are neither parameters nor buffers: {', '.join(outside)}")
    with torch.device("meta"):
        model = subject.create().eval()
        x = torch.empty(2, 3, *subject.size)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    elsewhere = [name for name, tensor in tensors if not tensor.is_meta]
    require(not elsewhere, f"built under torch.device('meta'), on another device: {', '.join(elsewhere[:8])}")
    with at("on the meta device"):
        out = model(x)
    fits = out.is_meta and out.shape == subject.model(subject.given).shape
    require(fits, f"the meta device gives {tuple(out.shape)} on {out.device}")
    moved = [*subject.model.named_parameters(), *subject.model.named_buffers()]
    wrong = [name for name, tensor in moved if tensor.is_floating_point() and tensor.dtype != torch.float64]
    require(not wrong, f"not in float64 after .to(torch.float64): {', '.join(wrong)}")
    return f"{len(tensors)} parameters and buffers"


NUMERICS = (
    Check("float32 and float64", float32_and_float64),
    Check("autocast bfloat16", autocast(torch.bfloat16)),
    Check("autocast float16", autocast(torch.float16)),
    Check("devices", devices),
)


def _strays(module: nn.Module) -> list[str]:
    """Returns tensors in a module's attributes that are not registered, so that `.to` does not move them."""
    return [
        f"{type(module).__name__}.{name}"
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
        and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    ]


DECAY = 0.5


def checkpointing(subject: BackboneSubject) -> str:
    """Checks that `set_grad_checkpointing` stores fewer activations and does not change gradients."""
    model = subject.build().train()
    plain, kept = _gradients(model, subject.given), kept_for_backward(lambda: model(subject.given), model)
    model.set_grad_checkpointing()
    again, fewer = _gradients(model, subject.given), kept_for_backward(lambda: model(subject.given), model)
    errors = {name: _difference(again[name], gradient) for name, gradient in plain.items()}
    worst = max(errors, key=lambda name: sortable(errors[name]))
    judged(errors[worst], f"the gradient of {worst} differs by {errors[worst]:.0e}")
    said = f"{fewer / 2**20:.1f} MB instead of {kept / 2**20:.1f} MB kept for the backward pass"
    require(fewer < kept, said)
    model.set_grad_checkpointing(False)
    as_before = kept_for_backward(lambda: model(subject.given), model) == kept
    require(as_before, "set_grad_checkpointing(False) does not switch it off")
    return f"{said}, gradients differ by {errors[worst]:.0e}"


@torch.no_grad()
def stochastic_depth(subject: BackboneSubject) -> str:
    """Checks that `drop_path_rate` acts in training and not in evaluation, and that a batch of one image trains."""
    try:
        model = subject.build(drop_path_rate=0.5)
    except UserError as refusal:  # there is no residual branch
        raise not_supported(message(refusal)) from refusal
    error = relative_error(model(subject.given), subject.model(subject.given))
    require(error <= EXACT, f"drop_path_rate=0.5 changes the output in evaluation by {error:.0e}")
    model.train()
    x = images(subject.size, batch=8)
    outs = [model(x) for _ in range(2)]
    require(not torch.equal(*outs), "two calls in training with drop_path_rate=0.5 are equal")
    alone = model(x[:1])
    lost = int((~alone.isfinite()).sum())
    fits = tuple(alone.shape) == (1, CLASSES) and not lost
    require(fits, f"one image in training gives {tuple(alone.shape)}, {lost} not finite")
    return f"two calls in training differ by {relative_error(*outs):.0e}"


@torch.no_grad()
def parameter_groups(subject: BackboneSubject) -> str:
    """Checks the names without weight decay, and timm's layer-wise learning rates, which must never decrease."""
    model = subject.model
    without_decay = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    missing = sorted(without_decay - {name for name, _ in model.named_parameters()})
    require(not missing, f"no parameter is called {', '.join(missing)}, which no_weight_decay() lists")
    groups = timm.optim.param_groups_layer_decay(model, layer_decay=DECAY)
    scales = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    ordered = [(name, scales[id(p)]) for name, p in _in_order_of_use(model, subject.given) if id(p) in scales]
    for (before, high), (name, low) in itertools.pairwise(ordered):
        require(low >= high, f"{name} has the rate {low:g} after {before} with {high:g}")
    head = [scales[id(parameter)] for part in classifiers(model) for parameter in part.parameters()]
    require(head and min(head) == 1, f"the classifier's rates are {head}")
    rates = sorted({scale for _, scale in ordered})
    require(len(rates) > 2, f"only the rates {rates}")
    return f"{len(rates)} rates from {rates[0]:.1g} to 1; {len(without_decay)} names without weight decay"


def _gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """Returns the gradients of images and parameters."""
    x = x.clone().requires_grad_()
    return gradients_of(model(x), {"images": x, **trainable(model)})


def _difference(got: Tensor | None, want: Tensor | None) -> float:
    """Returns the relative error of a gradient; infinity if only one of them exists."""
    if got is None or want is None:
        return 0.0 if got is want else math.inf
    return relative_error(got, want)


def _in_order_of_use(model: nn.Module, x: Tensor) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters, each once, in the order in which their modules are first called."""
    found: dict[nn.Parameter, str] = {}
    called: set[nn.Module] = set()

    def note(prefix: str) -> Any:
        def hook(module: nn.Module, _: Any) -> None:
            if module not in called:
                called.add(module)
                for name, parameter in module.named_parameters(recurse=False):
                    found.setdefault(parameter, f"{prefix}.{name}".lstrip("."))

        return hook

    handles = [module.register_forward_pre_hook(note(name)) for name, module in model.named_modules()]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return [(name, parameter) for parameter, name in found.items()]
