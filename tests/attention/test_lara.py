"""LARA equals its authors' code in evaluation, and its formula with and without noise."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import Grid, UserError
from linvit.attention.lara import LARAAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_same_gradients, inputs, mechanism, options_then_grids

GRIDS = [Grid((5, 4), num_prefix=1), Grid((1, 7)), Grid((4, 6), (2, 3), num_prefix=1)]
OPTIONS = [
    {"landmarks": 4},
    {"landmarks": 4, "weighting": "balance", "alpha": 3.0},
    {"landmarks": 9, "mixed": True, "alpha": 0.2},
]


def landmarks(layers: torch.nn.Module, x: Tensor, size: tuple[int, int], side: int) -> Tensor:
    """Means of parts of the patches, each head alone, through the layers, (B, h, m, dk)."""
    patches = x[:, :, x.shape[2] - size[0] * size[1] :]
    return torch.stack(
        [
            layers(F.adaptive_avg_pool2d(patches[:, h].mT.unflatten(2, size), side).flatten(2).mT)
            for h in range(x.shape[1])
        ],
        dim=1,
    )


def naive(module: LARAAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid, noise: Tensor | float) -> Tensor:
    """A landmark after the other."""
    scale = q.shape[-1] ** -0.5
    a = landmarks(module.q_bar, q, grid.size, module.side)
    b = landmarks(module.k_bar, k, grid.keys_size, module.side)
    if module.mixed:
        b = torch.softmax(scale * b @ b.mT, -1) @ b
    mu = a + b
    drawn = mu + noise
    logs, values = [], []
    for c in range(module.landmarks):
        u = drawn[:, :, c : c + 1]
        keys = scale * (u @ k.mT)[:, :, 0] - scale / 2 * (k * k).sum(-1)  # (B, h, M)
        means = scale * (u @ mu.mT)[:, :, 0] - scale / 2 * (mu * mu).sum(-1)  # (B, h, m)
        values.append(torch.einsum("bhm,bhmd->bhd", torch.softmax(keys, -1), v))
        log = scale * (u @ q.mT)[:, :, 0] + keys.exp().sum(-1, keepdim=True).log()  # (B, h, N)
        if module.weighting == "balance":
            logs.append(log - means.exp().sum(-1, keepdim=True).log())
            continue
        near = torch.softmax(scale * a @ q.mT, -1)  # (B, h, m, N)
        heuristic = means[..., c : c + 1].exp() / means.exp().sum(-1, keepdim=True)
        shares = heuristic + module.alpha * (near[:, :, c] - near.mean(2))
        logs.append(log + shares.clamp_min(1e-8).log() - means[..., c : c + 1])
    weights = torch.softmax(torch.stack(logs, -1), -1)  # (B, h, N, m)
    return weights @ torch.stack(values, 2)


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "lara", **options}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, grid, 0.0)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-7)


def test_noise_of_training_has_its_gradients() -> None:
    """The backward pass, which runs the formula once more, takes the numbers that were drawn."""
    grid = Grid((3, 4))
    module = mechanism({"name": "lara", "landmarks": 4}, grid).train()
    given = inputs(module, grid, grad=True)
    torch.manual_seed(3)
    got = given(module, grid)
    torch.manual_seed(3)
    noise = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    want = naive(module, given.q, given.k, given.v, grid, noise)
    assert_same_gradients(got, want, given.tensors, 1e-7)


@both_precisions
@of_case("lara_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    official = golden.constructor
    grid = Grid((golden.kwargs["H"], golden.kwargs["W"]))
    module = LARAAttention(
        official["dim"],
        official["num_heads"],
        grid,
        landmarks=official["num_landmarks"],
        mixed=official["proposal_gen"] == "pool-mixed",
        weighting={"mis-opt": "optimal", "mis-bh": "balance"}[official["mis_type"]],
        alpha=official["alpha_coeff"],
    )

    def ours(name: str) -> str:
        return name.replace("_gen.2", ".0").replace("_gen.3", ".1")

    module.load_state_dict({ours(name): tensor for name, tensor in golden.parameters().items()})
    module.to(dtype).eval()
    given = golden.inputs(dtype)
    golden.check_call(module(*given, grid), given)
    golden.check_parameters(module, ours)


def test_landmarks_that_are_no_square_are_refused() -> None:
    with pytest.raises(UserError, match="landmarks must be a square, such as 4 or 9; got 5"):
        LARAAttention(24, 3, Grid((4, 4)), landmarks=5)
