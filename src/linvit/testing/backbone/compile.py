"""Compilation and export of a backbone."""

from typing import Any

import torch
from torch import Tensor

from linvit.errors import UserError
from linvit.testing.attention.compile import has_compiler
from linvit.testing.attention.inputs import EXACT, normal, relative_error
from linvit.testing.backbone.images import Size, Subject, images, sized
from linvit.testing.report import Finding, at, failed, message, not_supported, passed


def compiles(subject: Subject) -> Finding:
    """Checks that `torch.compile(fullgraph=True)` gives eager's logits and gradients, and its logits at a second size.

    Inductor's code is compared on logits at one size; the rest goes through the same graphs run eagerly, since it is
    the tracing that can fail there. At the second size torch traces again with symbolic sizes, and gradients are left
    out: torch cannot trace that of an antialiased interpolation so.
    """
    errors = {}
    if has_compiler():
        errors["inductor, logits"] = _compiled_error(subject, "inductor", (subject.size,), gradients=False)
    errors["aot_eager, gradients"] = _compiled_error(subject, "aot_eager", (subject.size,), gradients=True)
    errors["aot_eager, two sizes"] = _compiled_error(
        subject, "aot_eager", (subject.size, subject.wide), gradients=False
    )
    said = "compiled and eager differ by " + ", ".join(f"{error:.0e} ({name})" for name, error in errors.items())
    return passed(said) if all(e <= EXACT for e in errors.values()) else failed(f"{said} (at most {EXACT:.0e})")


@torch.no_grad()
def exports(subject: Subject, any_size: bool = True) -> Finding:
    """Checks that `torch.export.export` gives eager's logits, by one program for any batch, height and width.

    The program is for a single size where modules declare `exports_any_size = False`, or the model refuses other sizes.
    """
    model = subject.model
    fixed = sorted(
        {type(module).__name__ for module in model.modules() if not getattr(module, "exports_any_size", True)}
    )
    refused = f"{', '.join(fixed)}: exports_any_size is False" if fixed else ""
    given = [subject.given]
    if any_size and not fixed:
        height, width = subject.wide
        given += [images(size, batch=batch) for size, batch in ((subject.wide, 3), ((2 * height, width + height), 1))]
    try:
        wanted = [model(x) for x in given]
    except UserError as error:
        refused, given, wanted = message(error), given[:1], [model(given[0])]
    left_open = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    program = torch.export.export(
        model, (subject.given,), dynamic_shapes=(left_open,) if len(given) > 1 else None
    ).module()
    errors = {}
    for x, want in zip(given, wanted, strict=True):
        size = sized((x.shape[-2], x.shape[-1]))
        with at(f"a batch of {len(x)}, {size}"):
            errors[size] = relative_error(program(x), want)
    said = "exported and eager differ by " + ", ".join(f"{error:.0e} ({size})" for size, error in errors.items())
    if not all(error <= EXACT for error in errors.values()):
        return failed(f"{said} (at most {EXACT:.0e})")
    return not_supported(f"other sizes: {refused}; {said}") if refused else passed(said)


def _compiled_error(subject: Subject, backend: str, sizes: tuple[Size, ...], gradients: bool) -> float:
    """Returns the largest relative error over the sizes, all through one instance."""
    torch.compiler.reset()
    model = subject.model
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    errors = []
    for size in sizes:
        x = images(size)
        with at(f"{backend}, {sized(size)}"), torch.set_grad_enabled(gradients):
            results = zip(_results(compiled, model, x), _results(model, model, x), strict=True)
            errors += [relative_error(got, want) for got, want in results]
    torch.compiler.reset()
    return max(errors, key=lambda error: float("inf") if error != error else error)


def _results(run: Any, model: Any, x: Tensor) -> list[Tensor]:
    """Returns the logits and, where gradients are on, the gradients of a random scalar of them."""
    out = run(x)
    if not torch.is_grad_enabled():
        return [out]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(out, parameters, normal(*out.shape, seed=9), allow_unused=True)
    return [out, *(g for g in found if g is not None)]
