"""Small makers and comparisons that the tests share."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn

import linvit
from linvit import Attention, Grid
from linvit.analysis.rank import effective_rank_of, row_statistics, singular_values
from linvit.registry import Registry, attentions

M = TypeVar("M", bound=nn.Module)

_LOW_RANK: dict[str, dict[str, Any]] = {
    "enhanced_linear": {"scales": ()},
    "focused": {"dwc": False},
    "slab": {"dwc": False},
    "pola": {"dwc": False},
    "mhla": {"lepe_kernel": 0, "blocks": 1},
    "soft": {"conv_size": 0},
    "soft_norm": {"conv_size": 0},
    "nystrom": {"conv_kernel": 0, "num_landmarks": 4},
    "linformer": {"k": 4},
    "agent": {"dwc_kernel": 0, "agents": 4},
    "rala": {"lepe_kernel": 0},
    "inline": {"residual_kernel": 0},
    "mala": {"lepe_kernel": 0},
    "mlla": {"lepe_kernel": 0},
    "pola_pp": {"lepe_kernel": 0},
    "nala": {"lepe_kernel": 0},
    "lara": {"landmarks": 4},
}


def own_names(registry: Registry) -> list[str]:
    """The registered names that are linvit's own, without those of plug-ins; nothing is imported.

    The backbone `transformers` needs an extra, and has tests of its own.
    """
    found = [name for name, (entry, *_) in registry.entries().items() if entry.owner == "linvit"]
    return [name for name in found if name != "transformers"]


def token_mixers() -> list[str]:
    """linvit's own attentions that have a matrix over tokens, and not one over channels, or none."""
    built = {name: attentions.get(name) for name in own_names(attentions)}
    mixers = {name for name, kind in built.items() if kind.channel_matrix is Attention.channel_matrix}
    return [name for name in built if name in mixers and not built[name].facts.no_matrix]


def low_rank(name: str) -> dict[str, Any]:
    """The mechanism with options that make its matrix a thin product, also at few tokens, if there are any."""
    return {"name": name, **_LOW_RANK.get(name, {})}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    """Reproducible normal numbers, drawn in float64 for every dtype."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(dtype).requires_grad_(grad)


def perturb(module: M, seed: int = 7, scale: float = 0.3) -> M:
    """Moves every parameter away from its initial value, so that wrong wiring shows."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.add_(scale * randn(*parameter.shape, seed=seed + i).to(parameter.dtype))
    return module


def mechanism(
    spec: linvit.registry.Spec,
    grid: Grid,
    dim: int = 24,
    num_heads: int = 3,
    dtype: torch.dtype = torch.float64,
    **context: Any,
) -> Attention:
    """A registered mechanism with parameters away from their initial values, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # two of the same sizes are equal
        built = linvit.create_attention(spec, dim=dim, num_heads=num_heads, grid=grid, **context)
    return perturb(built.to(dtype)).eval()


class Inputs(NamedTuple):
    """What a host hands to a mechanism."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra: dict[str, Tensor]

    def __call__(self, module: nn.Module, grid: Grid) -> Tensor:
        """Calls a mechanism on these inputs."""
        return module(self.q, self.k, self.v, grid, **self.extra)

    @property
    def tensors(self) -> list[Tensor]:
        """The distinct tensors."""
        tensors = [self.q, self.v, *self.extra.values()]
        return tensors if self.k is self.q else [*tensors, self.k]

    def map(self, change: Any) -> "Inputs":
        """The same inputs, each tensor changed."""
        q = change(self.q)
        k = q if self.k is self.q else change(self.k)
        return Inputs(q, k, change(self.v), {name: change(t) for name, t in self.extra.items()})


def inputs(
    module: Attention,
    grid: Grid,
    batch: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    scale: float = 1.0,
    grad: bool = False,
) -> Inputs:
    """Random q, k, v (and x, where taken) of the shapes that a mechanism declares."""

    def make(offset: int, *shape: int) -> Tensor:
        return (scale * randn(*shape, seed=seed + offset)).to(dtype).requires_grad_(grad)

    heads = module.key_heads
    q = make(1, batch, heads, grid.num_queries, module.key_dim)
    k = q if module.host.project == "qv" else make(2, batch, heads, grid.num_keys, module.key_dim)
    v = make(3, batch, module.num_heads, grid.num_keys, module.head_dim)
    return Inputs(q, k, v, {"x": make(4, batch, grid.num_queries, module.input_dim)} if module.host.input else {})


def options_then_grids(options: Sequence[Any], grids: Sequence[Grid]) -> list[tuple[Any, Grid]]:
    """All options at the first grid, and the first options at every other grid."""
    return [*((chosen, grids[0]) for chosen in options), *((options[0], grid) for grid in grids[1:])]


def formulas(table: Mapping[str, tuple[Any, Sequence[dict[str, Any]], Sequence[Grid]]]) -> Any:
    """Parametrises a test over `spec`, `grid` and `naive` from a table of formulas, options and grids by name."""
    cases = [
        pytest.param({"name": name, **options}, grid, naive, id=f"{name}-{options}-{grid}")
        for name, (naive, each, grids) in table.items()
        for options, grid in options_then_grids(each, grids)
    ]
    return pytest.mark.parametrize(("spec", "grid", "naive"), cases)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference over the largest entry; NaN stays NaN."""
    assert got.shape == want.shape
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp_min(torch.finfo(torch.float64).tiny))


def assert_near(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Holds `relative_error` to a tolerance."""
    error = relative_error(got, want)
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"


def assert_exported_for_any_batch(model: nn.Module, images: Tensor, tolerance: float) -> None:
    """Holds a program that was exported with two of the images to what the model makes of all."""
    sizes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model.eval(), (images[:2],), dynamic_shapes=sizes).module()
    assert_near(program(images), model(images), tolerance)


def assert_same_gradients(got: Tensor, want: Tensor, sources: Sequence[Tensor], tolerance: float) -> None:
    """Holds two outputs and the gradients of a random scalar of them with respect to the sources."""
    assert_near(got, want, tolerance)
    probe = randn(*got.shape, seed=99).to(got.dtype)
    for ours, theirs in zip(*(torch.autograd.grad(out, sources, probe) for out in (got, want)), strict=True):
        assert_near(ours, theirs, tolerance)


def assert_formula(
    spec: linvit.registry.Spec, grid: Grid, naive: Any, tolerance: float = 1e-10, dim: int = 24, num_heads: int = 3
) -> None:
    """Holds a mechanism and its gradients, of inputs and parameters, to `naive(module, q, k, v, grid, **extra)`."""
    module = mechanism(spec, grid, dim, num_heads)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, grid, **given.extra)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], tolerance)


def effective_rank(matrix: Tensor) -> Tensor:
    """That of matrices (..., N, M)."""
    return effective_rank_of(singular_values(matrix))


def entropy(matrix: Tensor) -> Tensor:
    """The mean entropy of the rows of matrices (..., N, M)."""
    rows, columns = matrix.shape[-2:]
    return row_statistics(matrix, torch.arange(rows), Grid((1, rows), (1, columns)))["entropy"]


def leaves(out: Tensor) -> set[int]:
    """Identities of the tensors that a gradient of a value reaches, which may be 0."""
    nodes, left = set(), [out.grad_fn]
    while left:
        if (node := left.pop()) is not None and node not in nodes:
            nodes.add(node)
            left += [above for above, _ in node.next_functions]
    return {id(node.variable) for node in nodes if hasattr(node, "variable")}
