"""Numbers for the checks: reproducible inputs and gradients; comparisons from `linvit.finite`."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from linvit.finite import relative_error as relative_error
from linvit.finite import sortable as sortable
from linvit.finite import worst as worst

EXACT = 1e-9
"""Relative tolerance in float64 for results that differ only in the order of sums: these differ by 1e-15 and, for
inverses by iteration, by six digits more."""
SEED = 9


def normal(*shape: int, seed: int) -> Tensor:
    """Returns reproducible normal numbers in float64, independent of the global generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients_of(out: Tensor | Sequence[Tensor], sources: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Returns the gradients of a random scalar of the outputs, by the names of the sources; None without gradient."""
    outs = [out] if isinstance(out, Tensor) else list(out)
    probes = [normal(*x.shape, seed=SEED + i).to(x.dtype) for i, x in enumerate(outs)]
    found = torch.autograd.grad(outs, list(sources.values()), probes, allow_unused=True)
    return dict(zip(sources, found, strict=True))


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters that require gradients, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def disturb(module: nn.Module) -> None:
    """Changes every parameter by a tenth of its size, or by 0.1 if it is zero, since zero weights hide their effect."""
    for seed, parameter in enumerate(module.parameters()):
        size = float(parameter.double().square().mean().sqrt()) or 1.0
        parameter.add_((0.1 * size * normal(*parameter.shape, seed=100 + seed)).to(parameter.dtype))
