"""Precisions and devices of a backbone."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from linvit.testing.backbone.images import BackboneSubject, images
from linvit.testing.numbers import relative_error
from linvit.testing.report import Check, Line, at, failed, judged, passed

SCALES = {f"images of scale 2^{power}": 2.0**power for power in (-10, 0, 6)}
FLOAT32 = 1e-3
"""Relative error of float32 against float64 that a whole network may have: float32's epsilon is 1e-7, and an inverse or
a normaliser near 0 in a few of dozens of blocks costs four digits."""


@torch.no_grad()
def float32_and_float64(subject: BackboneSubject) -> Line:
    """Checks that both run, each in its own precision, and agree."""
    exact = subject.model(subject.given)
    model = subject.build(dtype=torch.float32)
    out = model(subject.given.float())
    for dtype, given in ((torch.float64, exact), (torch.float32, out)):
        if given.dtype != dtype:
            return failed(f"{dtype} images give {given.dtype} logits".replace("torch.", ""))
    error = relative_error(out, exact)
    return judged(error, f"they differ by {error:.0e}", FLOAT32)


def autocast(dtype: torch.dtype) -> Callable[[BackboneSubject], Line]:
    """Returns the check that autocast gives finite logits at any scale of images and, in bfloat16, finite gradients.

    Gradients in float16 are left out: they need the loss scaling that only a training loop has.
    """

    def check(subject: BackboneSubject) -> Line:
        model = subject.build(dtype=torch.float32).train()
        for name, scale in SCALES.items():
            with at(name), torch.autocast("cpu", dtype):
                out = model(scale * images(subject.size, dtype=torch.float32))
            if not out.isfinite().all():
                return failed(f"{int((~out.isfinite()).sum())} of {out.numel()} logits not finite, {name}")
            if dtype == torch.bfloat16:
                model.zero_grad()
                out.float().square().mean().backward()
                lost = [
                    name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()
                ]
                if lost:
                    return failed(f"gradients of {', '.join(lost[:8])} not finite, {name}")
        return passed(", ".join(SCALES))

    return check


@torch.no_grad()
def devices(subject: BackboneSubject) -> Line:
    """Checks that the model can be built on the meta device and runs there, and that `.to` moves every tensor."""
    outside = [name for module in subject.model.modules() for name in _strays(module)]
    if outside:
        return failed(f"tensors that are neither parameters nor buffers: {', '.join(outside)}")
    with torch.device("meta"):
        built = subject.create()
        x = torch.empty(2, 3, *subject.size)
    model = built.eval()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    elsewhere = [name for name, tensor in tensors if not tensor.is_meta]
    if elsewhere:
        return failed(f"built under torch.device('meta'), on another device: {', '.join(elsewhere[:8])}")
    with at("on the meta device"):
        out = model(x)
    if not out.is_meta or out.shape != subject.model(subject.given).shape:
        return failed(f"the meta device gives {tuple(out.shape)} on {out.device}")
    wrong = [
        name
        for name, tensor in [*subject.model.named_parameters(), *subject.model.named_buffers()]
        if tensor.is_floating_point() and tensor.dtype != torch.float64
    ]
    if wrong:
        return failed(f"not in float64 after .to(torch.float64): {', '.join(wrong)}")
    return passed(f"{len(tensors)} parameters and buffers")


NUMERICS = (
    Check("float32 and float64", float32_and_float64),
    Check("autocast bfloat16", autocast(torch.bfloat16)),
    Check("autocast float16", autocast(torch.float16)),
    Check("devices", devices),
)


def _strays(module: nn.Module) -> list[str]:
    """Returns the tensors in a module's attributes that it does not register, so that nothing moves them."""
    return [
        f"{type(module).__name__}.{name}"
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
        and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    ]
