"""Performer equals lucidrains' code and the formula; its features are unbiased; W is redrawn reproducibly."""

import copy
import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from linvit import Grid
from linvit.attention.ops.linear import linear_attention
from linvit.attention.performer import PerformerAttention, draw
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import (
    assert_near,
    assert_same_gradients,
    inputs,
    mechanism,
    options_then_grids,
    randn,
    relative_error,
)

GRID = Grid((3, 5), kv_size=(2, 3), num_prefix=1)


# The reference implementation


def official(weight: Tensor, num_heads: int, dtype: torch.dtype, **options: object) -> PerformerAttention:
    """Our mechanism with an official W, in evaluation mode."""
    features, width = weight.shape
    module = PerformerAttention(width * num_heads, num_heads, Grid((1, 1)), nb_features=features, **options)
    module.projection_matrix.copy_(weight)
    return module.to(dtype).eval()


@both_precisions
@of_case("performer_phi")
def test_features_equal_lucidrains(golden: Golden, dtype: torch.dtype) -> None:
    (x,) = given = golden.inputs(dtype)
    module = official(golden.parameters()["projection_matrix"], x.shape[1], dtype)
    phi_q, phi_k = module.features(x, x)
    golden.check_call(phi_q if golden.constructor["is_query"] else phi_k, given)


@both_precisions
@of_case("performer_linear")
def test_linear_attention_equals_lucidrains(golden: Golden, dtype: torch.dtype) -> None:
    given = golden.inputs(dtype)
    golden.check_call(linear_attention(*given, eps=0.0), given)


@both_precisions
@of_case("performer_fast")
def test_equals_lucidrains(golden: Golden, dtype: torch.dtype) -> None:
    given = golden.inputs(dtype)
    kernel = golden.constructor["kernel_fn"] if golden.constructor.get("generalized_attention") else "softmax"
    module = official(golden.parameters()["projection_matrix"], given[0].shape[1], dtype, kernel=kernel)
    golden.check_call(module(*given, Grid((1, given[0].shape[2]))), given)


@both_precisions
@of_case("performer_self")
def test_equals_lucidrains_layer(golden: Golden, dtype: torch.dtype) -> None:
    (x,) = given = golden.inputs(dtype)
    heads = golden.constructor["heads"]
    p = {name: t.to(dtype, copy=True).requires_grad_() for name, t in golden.parameters().items()}
    module = official(p.pop("fast_attention.projection_matrix").detach(), heads, dtype)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    q, k, v = (linear(name, x).unflatten(2, (heads, -1)).transpose(1, 2) for name in ("to_q", "to_k", "to_v"))
    out = module(q, k, v, Grid((1, x.shape[1]))).transpose(1, 2).flatten(2)  # (B, h, N, d) -> (B, N, h*d)
    golden.check_call(linear("to_out", out), given)
    for name, parameter in p.items():
        golden.check(f"grad_param.{name}", parameter.grad)


# The formula


def naive(module: PerformerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`sum_m (phi(q_n).phi(k_m)) v_m / sum_m phi(q_n).phi(k_m)`, one query at a time."""
    phi_q, phi_k = naive_features(module, q, k)
    rows = []
    for n in range(q.shape[2]):
        weights = (phi_q[:, :, n : n + 1] * phi_k).sum(-1)  # (B, h, M)
        rows.append((weights[..., None] * v).sum(2) / weights.sum(-1, keepdim=True))
    return torch.stack(rows, dim=2)


def naive_features(module: PerformerAttention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    if module.kernel == "none":
        return torch.exp(q) / torch.exp(q).sum(-1, keepdim=True), torch.exp(k) / torch.exp(k).sum(2, keepdim=True)
    w, d = module.projection_matrix, module.key_dim
    u_q, u_k = (torch.einsum("bhnd,md->bhnm", x / d**0.25, w) for x in (q, k))
    if module.kernel == "relu":
        return torch.clamp(u_q, min=0) + module.kernel_eps, torch.clamp(u_k, min=0) + module.kernel_eps
    if module.kernel == "exp":
        return torch.exp(u_q) + module.kernel_eps, torch.exp(u_k) + module.kernel_eps
    g_q, g_k = (x.square().sum(-1, keepdim=True) / (2 * d**0.5) for x in (q, k))
    peak_q = u_q.detach().max(-1, keepdim=True).values
    peak_k = u_k.detach().flatten(2).max(-1).values[..., None, None]
    phi_q, phi_k = torch.exp(u_q - g_q - peak_q), torch.exp(u_k - g_k - peak_k)
    return (phi_q + module.kernel_eps) / len(w) ** 0.5, (phi_k + module.kernel_eps) / len(w) ** 0.5


OPTIONS = [
    {},
    {"nb_features": 5},
    {"nb_features": 32},
    {"ortho_scaling": 1},
    {"kernel": "relu"},
    {"kernel": "exp"},
    {"kernel": "none"},
    {"kernel_eps": 0.5},
    {"kernel_eps": 0.0},
    {"kernel": "relu", "kernel_eps": 0.5},
    {"kernel": "exp", "kernel_eps": 3.0},
    {"kernel": "exp", "kernel_eps": 0.0},
]


@pytest.mark.parametrize(
    ("options", "grid"),
    options_then_grids([*OPTIONS, {"key_dim": 3}], [GRID, Grid((7, 9))]),
    ids=str,
)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "performer", **options}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v)
    assert_same_gradients(given(module, grid), want, given.tensors, 1e-10)


@pytest.mark.parametrize("kernel", ["softmax", "exp"])
def test_gradients_are_those_of_finite_differences(kernel: str) -> None:
    """The detached maxima change no gradient where they cancel: without kernel_eps, and always in "exp"."""
    grid = Grid((2, 3))
    eps = 0.0 if kernel == "softmax" else 1e-3
    module = mechanism({"name": "performer", "kernel": kernel, "kernel_eps": eps, "seed": 0}, grid, dim=4, num_heads=2)
    q, k, v, _ = inputs(module, grid, batch=1, grad=True)
    assert torch.autograd.gradcheck(lambda q, k, v: module(q, k, v, grid), (q, k, v))


# The random features


def test_blocks_have_orthogonal_rows() -> None:
    for number in range(3):
        w = draw((11, 4), 0, 1, number)
        unit = w / w.norm(dim=1, keepdim=True)
        for block in unit.split(4):
            assert_near(block @ block.mT, torch.eye(len(block), dtype=torch.float64), 1e-12)


def test_features_estimate_the_softmax_kernel_without_bias() -> None:
    """The mean over W of `phi(q).phi(k)` is `exp(q.k / sqrt(d))` (Lemma 1), and orthogonal rows vary less."""
    q, k = 0.5 * randn(4), 0.5 * randn(4, seed=1)
    q, k = q / 2**0.5, k / 2**0.5  # d^(1/4)
    w = draw((40_000, 4), 0, 0, 0)
    norms = (q @ q + k @ k) / 2
    estimates = torch.exp(w @ (q + k) - norms)
    want = torch.exp(q @ k)
    assert estimates.mean().item() == pytest.approx(want.item(), rel=0.01)
    independent = torch.exp(randn(40_000, 4) @ (q + k) - norms)
    blocks, loose = (x.unflatten(0, (-1, 4)).mean(1).var() for x in (estimates, independent))
    assert blocks < 0.95 * loose


# Large inputs


@pytest.mark.parametrize(("scale", "eps"), [(1e-3, 1e-3), (100.0, 1e-3), (100.0, 0.0)])
def test_exponential_features_do_not_overflow(scale: float, eps: float) -> None:
    """exp(u) itself is beyond float32 from u = 89; the quotient is not."""
    grid = Grid((7, 9))
    options = {"name": "performer", "kernel": "exp", "seed": 3, "kernel_eps": eps}
    module, exact = (mechanism(options, grid, dtype=dtype) for dtype in (torch.float32, torch.float64))
    module.projection_matrix.copy_(exact.projection_matrix)
    exact.projection_matrix.copy_(module.projection_matrix)
    given = inputs(module, grid, dtype=torch.float32, scale=scale, grad=True)
    out = given(module, grid)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in given.tensors)
    assert_near(out, given.map(lambda x: x.detach().double())(exact, grid), 1e-3)


# Redrawing


def built(interval: int | None, seed: int | None = 5, **options: object) -> PerformerAttention:
    return PerformerAttention(8, 2, Grid((2, 3)), redraw_interval=interval, seed=seed, **options).double()


def train(module: PerformerAttention, passes: int) -> list[Tensor]:
    """W after each of some training passes."""
    given = inputs(module, module.grid)
    history = []
    for _ in range(passes):
        given(module.train(), module.grid)
        history.append(module.projection_matrix.clone())
    return history


def test_w_is_redrawn_every_interval_from_the_seed_alone() -> None:
    module = built(3)
    draws = [draw((5, 4), 0, 5, number).float().double() for number in range(3)]
    assert torch.equal(module.projection_matrix, draws[0])
    for number, w in enumerate(train(module, 9)):
        assert_near(w, draws[number // 3], 1e-6)
    assert relative_error(draws[0], draws[1]) > 0.1
    assert module.passes == 9


def test_seeds_decide_and_without_one_layers_differ() -> None:
    assert torch.equal(built(3, seed=1).projection_matrix, built(3, seed=1).projection_matrix)
    assert not torch.equal(built(3, seed=1).projection_matrix, built(3, seed=2).projection_matrix)
    matrices = [draw((5, 4), 0, seed, number) for seed in (0, 1, 2**31, 2**32, 2**62) for number in range(9)]
    assert all(relative_error(a, b) > 0.1 for a, b in itertools.combinations(matrices, 2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = built(3, seed=None), built(3, seed=None)
        torch.manual_seed(0)
        again = built(3, seed=None)
    assert not torch.equal(first.projection_matrix, second.projection_matrix)
    assert torch.equal(first.projection_matrix, again.projection_matrix)


def test_evaluation_and_none_redraw_nothing() -> None:
    for module in (built(1).eval(), built(None).train()):
        given = inputs(module, module.grid)
        before = module.projection_matrix.clone()
        for _ in range(3):
            given(module, module.grid)
        assert torch.equal(module.projection_matrix, before)
        assert module.passes == 0


def test_redrawing_leaves_the_global_generator_alone() -> None:
    module, state = built(1), torch.get_rng_state()
    train(module, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_resumed_run_draws_what_the_uninterrupted_one_does() -> None:
    module = built(3)
    train(module, 4)
    resumed = built(3, seed=6)
    resumed.load_state_dict(copy.deepcopy(module.state_dict()))
    for ours, theirs in zip(train(resumed, 6), train(module, 6), strict=True):
        assert torch.equal(ours, theirs)


def test_redraw_does_not_reach_into_an_earlier_pass() -> None:
    """Two passes, a new W in the second, then the backward of both: each goes back through its own W."""
    module = built(1).train()
    given = inputs(module, module.grid, grad=True)
    outs, matrices = [], []
    for _ in range(2):
        outs.append(given(module, module.grid))
        matrices.append(module.projection_matrix.clone())
    assert relative_error(*matrices) > 0.1
    sum(out.square().sum() for out in outs).backward()
    plain = given.map(lambda x: x.detach().requires_grad_())
    for matrix in matrices:
        same = built(None)
        same.projection_matrix.copy_(matrix)
        plain(same, same.grid).square().sum().backward()
    for ours, theirs in zip(given.tensors, plain.tensors, strict=True):
        assert_near(ours.grad, theirs.grad, 1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_repeats_a_pass_with_its_own_w(use_reentrant: bool) -> None:
    module, same = built(1).train(), built(1).train()
    for _ in range(3):
        given = inputs(module, module.grid, grad=True)
        plain = given.map(lambda x: x.detach().requires_grad_())
        checkpoint(module, *given[:3], module.grid, use_reentrant=use_reentrant).square().sum().backward()
        plain(same, same.grid).square().sum().backward()
        for ours, theirs in zip(given.tensors, plain.tensors, strict=True):
            assert_near(ours.grad, theirs.grad, 1e-12)
    assert module.passes == same.passes == 3


@pytest.mark.slow
def test_compiled_training_redraws_alike() -> None:
    module, same = built(2).float().train(), built(2).float().train()
    compiled = torch.compile(module, fullgraph=True)
    for _ in range(5):
        given = inputs(module, module.grid, dtype=torch.float32, grad=True)
        assert_same_gradients(
            compiled(given.q, given.k, given.v, module.grid), given(same, same.grid), given.tensors, 1e-4
        )
        assert torch.equal(module.projection_matrix, same.projection_matrix)
    assert module.passes == 5
