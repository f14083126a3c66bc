"""Compilation and export of a mechanism."""

import os
import shutil
from collections.abc import Callable

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention, Grid
from linvit.testing.attention.inputs import EXACT, NOMINAL, Inputs, Subject, inputs, normal, relative_error, shown
from linvit.testing.report import Finding, at, failed, not_supported, passed

SECOND = Grid((7, 9))
WIDE = Grid((12, 20))
COMPILERS = ("g++", "clang++", "cl")


def compiles(subject: Subject) -> Finding:
    """Checks that `torch.compile(fullgraph=True)` gives eager's output and gradients, at a second size too.

    Inductor's code is compared at one size. The second size, which makes torch trace again with symbolic sizes, goes
    through the same graphs run eagerly: it is the tracing that can fail there.
    """
    inductor = has_compiler()
    errors = {"inductor": _compiled_error(subject, "inductor", (NOMINAL,))} if inductor else {}
    errors["aot_eager"] = _compiled_error(subject, "aot_eager", (NOMINAL, SECOND))
    said = ", ".join(f"{error:.0e} ({backend})" for backend, error in errors.items())
    said = f"compiled and eager differ by {said}" + ("" if inductor else "; no C++ compiler, so not inductor")
    return passed(said) if all(e <= EXACT for e in errors.values()) else failed(f"{said} (at most {EXACT:.0e})")


def has_compiler() -> bool:
    """Returns whether inductor finds a C++ compiler."""
    return "CXX" in os.environ or any(map(shutil.which, COMPILERS))


def exports(subject: Subject) -> Finding:
    """Checks that `torch.export.export` gives eager's output, by one program for any batch and grid.

    The program is for the nominal grid alone where the mechanism declares `exports_any_size = False`.
    """
    mechanism = subject.build()
    program: Callable[..., Tensor] | None = None
    errors = {}
    for batch, grid in ((2, NOMINAL), (3, SECOND), (1, WIDE))[: 3 if mechanism.exports_any_size else 1]:
        given = inputs(mechanism, grid, batch=batch)
        planes = [x.unflatten(-2, grid.size) for x in given.named.values()]
        if program is None:
            left_open = [dict.fromkeys((0, x.ndim - 3, x.ndim - 2), torch.export.Dim.DYNAMIC) for x in planes]
            program = torch.export.export(
                _OnPlanes(mechanism, given),
                tuple(planes),
                dynamic_shapes=(tuple(left_open),) if mechanism.exports_any_size else None,
            ).module()
        with at(f"a batch of {batch}, {shown(grid)}"):
            errors[shown(grid)] = relative_error(program(*planes), given(mechanism, grid))
    said = "exported and eager differ by " + ", ".join(f"{error:.0e} ({grid})" for grid, error in errors.items())
    if not all(error <= EXACT for error in errors.values()):
        return failed(f"{said} (at most {EXACT:.0e})")
    return passed(said) if mechanism.exports_any_size else not_supported(f"exports_any_size is False; {said}")


def _compiled_error(subject: Subject, backend: str, grids: tuple[Grid, ...]) -> float:
    """Returns the largest relative error of outputs and gradients over the grids, all through one instance."""
    torch.compiler.reset()
    mechanism = subject.build()
    compiled = torch.compile(mechanism, fullgraph=True, backend=backend)
    errors = []
    for grid in grids:
        given = inputs(mechanism, grid).map(lambda x: x.requires_grad_())
        with at(f"{backend}, {shown(grid)}"):
            pairs = zip(
                _results(compiled, mechanism, given, grid), _results(mechanism, mechanism, given, grid), strict=True
            )
            errors += [relative_error(got, want) for got, want in pairs]
    return max(errors, key=lambda error: float("inf") if error != error else error)


def _results(run: Callable[..., Tensor], mechanism: Attention, given: Inputs, grid: Grid) -> list[Tensor]:
    """Returns the output and all gradients of a random scalar of it."""
    sources = [*given.named.values(), *(p for p in mechanism.parameters() if p.requires_grad)]
    out = given(run, grid)
    found = torch.autograd.grad(out, sources, normal(*out.shape, seed=9), allow_unused=True)
    return [out, *(g for g in found if g is not None)]


class _OnPlanes(nn.Module):
    """A mechanism whose tokens come as planes, (..., H, W, d), which say its grid: all arguments are tensors."""

    def __init__(self, mechanism: Attention, given: Inputs) -> None:
        super().__init__()
        self.mechanism = mechanism
        self.names = tuple(given.named)

    def forward(self, *planes: Tensor) -> Tensor:
        named = {name: plane.flatten(-3, -2) for name, plane in zip(self.names, planes, strict=True)}
        q, k, v = named.pop("q"), named.pop("k", None), named.pop("v")
        grid = Grid((planes[0].shape[-3], planes[0].shape[-2]))
        out: Tensor = self.mechanism(q, q if k is None else k, v, grid, **named)
        return out
