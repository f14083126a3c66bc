"""Checks compilation and export of a backbone, with any attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from linvit.errors import UserError
from linvit.inference.onnx import in_onnxruntime, require, to_onnx
from linvit.io.machine import has_compiler
from linvit.testing.backbone.images import BackboneSubject, images
from linvit.testing.numbers import EXACT, gradients_of, relative_error, trainable, worst
from linvit.testing.report import at, judged, message, not_supported
from linvit.testing.subject import Size, sized

ONNX_EXACT = 1e-5
"""The tolerance for float32 in onnxruntime."""


def compiles(subject: BackboneSubject) -> str:
    """Checks `torch.compile(fullgraph=True)` against eager; a second size, with symbolic sizes, is only traced."""
    errors, note = {}, ""
    for backend, sizes, with_gradients in subject.compilations:
        if backend == "inductor" and not has_compiler():
            note = "; no C++ compiler, so not inductor"
            continue
        name = f"{backend}{', gradients' if with_gradients else ''} at {' and '.join(map(sized, sizes))}"
        errors[name] = _compiled_error(subject, backend, sizes, with_gradients)
    said = f"compiled and eager differ by {', '.join(f'{error:.0e} ({name})' for name, error in errors.items())}"
    return judged(worst(errors.values()), said + note)


@torch.no_grad()
def exports(subject: BackboneSubject) -> str:
    """Checks that one exported program gives eager's outputs for any batch and size, or for a declared one."""

    def export(model: nn.Module, x: Tensor, shapes: Any) -> Any:
        return torch.export.export(model, (x,), dynamic_shapes=shapes).module()

    return _as_program(subject, export, torch.float64, EXACT)


@torch.no_grad()
def onnx(subject: BackboneSubject) -> str:
    """Checks that onnxruntime gives eager's outputs by one ONNX file, in float32; see `exports`."""
    try:
        require("onnx", "onnxscript", "onnxruntime")
    except UserError as error:
        raise not_supported(message(error)) from error

    def export(model: nn.Module, x: Tensor, shapes: Any) -> Any:
        run = in_onnxruntime(to_onnx(model.eval(), (x,), shapes).SerializeToString())
        return lambda x: run(x)[0]

    return _as_program(subject, export, torch.float32, ONNX_EXACT)


def _as_program(subject: BackboneSubject, export: Callable[..., Any], dtype: torch.dtype, tolerance: float) -> str:
    model = subject.build(dtype=dtype)
    fixed = sorted({type(part).__name__ for part in model.modules() if not getattr(part, "exports_any_size", True)})
    refused = f"{', '.join(fixed)}: exports_any_size is False" if fixed else ""
    cases = subject.exported_sizes[: 1 if fixed else None]
    try:
        for batch, size in cases[1:]:
            model(images(size, batch=batch, dtype=dtype))
    except UserError as error:
        refused, cases = message(error), cases[:1]
    errors: dict[str, float] = {}
    program: Any = None
    for batch, size in cases:
        x = images(size, batch=batch, dtype=dtype)
        if program is None:
            free = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
            program = export(model, x, (free,) if len(cases) > 1 else None)
        with at(f"a batch of {batch}, {sized(size)}"):
            errors[sized(size)] = relative_error(program(x), model(x))
    said = "exported and eager differ by " + ", ".join(f"{error:.0e} ({size})" for size, error in errors.items())
    judged(worst(errors.values()), said, tolerance)
    if refused:
        raise not_supported(f"other sizes: {refused}; {said}")
    return said


def _compiled_error(subject: BackboneSubject, backend: str, sizes: tuple[Size, ...], with_gradients: bool) -> float:
    """Returns the largest relative error of logits and gradients over the sizes, all with one instance."""
    torch.compiler.reset()
    model = subject.build()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    errors = []
    for size in sizes:
        with at(f"{backend}, {sized(size)}"), torch.set_grad_enabled(with_gradients):
            got, want = (_results(run, model, images(size)) for run in (compiled, model))
        errors += [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    torch.compiler.reset()
    return worst(errors)


def _results(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the logits and, where gradients are on, the gradients of a random scalar of them."""
    if not torch.is_grad_enabled():
        return [run(x)]
    x.requires_grad_()
    out = run(x)
    found = gradients_of(out, {"images": x, **trainable(model)})
    return [out, *(x for x in found.values() if x is not None)]
