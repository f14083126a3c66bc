"""Compilation and export of an attention or a backbone."""

import os
import shutil
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from linvit.errors import UserError
from linvit.testing.numbers import EXACT, gradients_of, relative_error, trainable, worst
from linvit.testing.onnx import in_onnxruntime, require, to_onnx
from linvit.testing.report import at, judged, message, not_supported
from linvit.testing.subject import Subject, sized

ONNX_EXACT = 1e-5
"""The same for float32 in onnxruntime."""
COMPILERS = ("g++", "clang++", "cl")


def compiles(subject: Subject) -> str:
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


def has_compiler() -> bool:
    """Returns whether inductor finds a C++ compiler."""
    return "CXX" in os.environ or any(map(shutil.which, COMPILERS))


@torch.no_grad()
def exports(subject: Subject) -> str:
    """Checks that one exported program gives eager's outputs for any batch and size, or one that is declared."""

    def export(model: nn.Module, planes: tuple[Tensor, ...], shapes: Any) -> Any:
        return torch.export.export(model, planes, dynamic_shapes=shapes).module()

    return _as_program(subject, export, torch.float64, EXACT)


@torch.no_grad()
def onnx(subject: Subject) -> str:
    """Checks that onnxruntime gives eager's outputs by one ONNX file, in float32; see `exports`."""
    try:
        require("onnx", "onnxscript", "onnxruntime")
    except UserError as error:
        raise not_supported(message(error)) from error

    def export(model: nn.Module, planes: tuple[Tensor, ...], shapes: Any) -> Any:
        run = in_onnxruntime(to_onnx(model.eval(), planes, shapes).SerializeToString())
        return lambda *planes: run(*planes)[0]

    return _as_program(subject, export, torch.float32, ONNX_EXACT)


def _as_program(subject: Subject, export: Callable[..., Any], dtype: torch.dtype, tolerance: float) -> str:
    model = subject.build(dtype=dtype)
    fixed = sorted({type(part).__name__ for part in model.modules() if not getattr(part, "exports_any_size", True)})
    refused = f"{', '.join(fixed)}: exports_any_size is False" if fixed else ""
    cases = subject.exported_sizes[: 1 if fixed else None]

    def inputs(batch: int, size: Any) -> Any:
        return subject.inputs(model, size, batch).map(lambda x: x.to(dtype))

    try:
        for batch, size in cases[1:]:
            inputs(batch, size)(model)
    except UserError as error:
        refused, cases = message(error), cases[:1]
    errors: dict[str, float] = {}
    program: Any = None
    for batch, size in cases:
        given = inputs(batch, size)
        planes = given.planes
        if program is None:
            free = [dict.fromkeys((0, *(x.ndim + i for i in given.spatial)), torch.export.Dim.DYNAMIC) for x in planes]
            program = export(_OnPlanes(model, given), planes, (tuple(free),) if len(cases) > 1 else None)
        with at(f"a batch of {batch}, {sized(size)}"):
            errors[sized(size)] = relative_error(program(*planes), given(model))
    said = "exported and eager differ by " + ", ".join(f"{error:.0e} ({size})" for size, error in errors.items())
    judged(worst(errors.values()), said, tolerance)
    if refused:
        raise not_supported(f"other sizes: {refused}; {said}")
    return said


class _OnPlanes(nn.Module):
    """A model all of whose arguments are tensors; these say by their shapes what the size is."""

    def __init__(self, model: nn.Module, given: Any) -> None:
        super().__init__()
        self.model = model
        self.given = given

    def forward(self, *planes: Tensor) -> Tensor:
        return cast("Tensor", self.given.from_planes(planes)(self.model))


def _compiled_error(subject: Subject, backend: str, sizes: tuple[Any, ...], with_gradients: bool) -> float:
    """Returns the largest relative error of outputs and gradients over the sizes, all through one instance."""
    torch.compiler.reset()
    model = subject.build()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    errors = []
    for size in sizes:
        with at(f"{backend}, {sized(size)}"), torch.set_grad_enabled(with_gradients):
            got, want = (_results(subject, run, model, size) for run in (compiled, model))
        errors += [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    torch.compiler.reset()
    return worst(errors)


def _results(subject: Subject, run: Any, model: Any, size: Any) -> list[Tensor]:
    """Returns the output and, where gradients are on, the gradients of a random scalar of it."""
    given = subject.inputs(model, size)
    if not torch.is_grad_enabled():
        return [given(run)]
    given = given.map(lambda x: x.requires_grad_())
    out = given(run)
    found = gradients_of(out, {**given.named, **trainable(model)})
    return [out, *(x for x in found.values() if x is not None)]
