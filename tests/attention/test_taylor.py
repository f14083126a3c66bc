"""The linear attention mechanism equals its authors' code and its formula, pair of tokens by pair of tokens."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import Grid, UserError, create_attention
from linvit.analysis import attention_matrix
from linvit.attention.taylor import TaylorAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids

GRIDS = [
    Grid((3, 5), kv_size=(2, 3), num_prefix=1),
    Grid((7, 9), num_prefix=2),
    Grid((1, 50)),
    Grid((50, 1)),
    Grid((13, 31)),
]
OPTIONS = [
    {},
    {"eps": 0.0},
    {"eps": 0.25},
    {"norm_eps": 0.0},
    {"norm_eps": 2.5},  # above some of the norms
    {"gamma": True},
    {"gamma": True, "eps": 0.1, "norm_eps": 2.0},
]


def naive_unit(x: Tensor, norm_eps: float) -> Tensor:
    """Vectors of length one, or shorter where the length is below `norm_eps`."""
    norm = (x * x).sum(-1, keepdim=True) ** 0.5
    return x / torch.where(norm < norm_eps, norm_eps, norm)


def naive_matrix(module: TaylorAttention, q: Tensor, k: Tensor) -> Tensor:
    """`gamma (1 + q_i.k_j) / sum_j (1 + q_i.k_j)` with eps in the sum of the keys, (B, h, N, M)."""
    q, k = naive_unit(q, module.norm_eps), naive_unit(k, module.norm_eps)
    similarity = 1 + torch.einsum("bhic,bhjc->bhij", q, k)
    total = similarity.sum(-1, keepdim=True) + module.eps * q.sum(-1, keepdim=True)
    return similarity / total * (1 if module.gamma is None else module.gamma)


def naive(module: TaylorAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`o_i = sum_j M_ij v_j`."""
    return torch.einsum("bhij,bhjd->bhid", naive_matrix(module, q, k), v)


# The authors' code


@both_precisions
@pytest.mark.parametrize("inside", [False, True], ids=["gamma-in-the-test", "gamma-in-the-mechanism"])
@of_case("lam_position", "maresunet_pam")
def test_equals_the_official_position_attention(golden: Golden, inside: bool, dtype: torch.dtype) -> None:
    """1x1 convolutions of C / 8 channels for queries and keys, one head, and `x + gamma * o`."""
    given = golden.inputs(dtype)
    weights = {name: t.to(dtype, copy=True).requires_grad_() for name, t in golden.parameters().items()}
    (x,) = given
    grid = Grid(tuple(x.shape[2:]))

    def project(name: str) -> Tensor:
        """(B, C, H, W) -> (B, 1, N, C')."""
        plane = F.conv2d(x, weights[f"{name}_conv.weight"], weights[f"{name}_conv.bias"])
        return plane.flatten(2).mT.unsqueeze(1)

    dim, width = golden.constructor["in_places"], weights["query_conv.bias"].shape[0]
    module = TaylorAttention(dim, 1, grid, key_dim=width, eps=golden.constructor["eps"], gamma=inside).to(dtype)
    if inside:
        module.load_state_dict({"gamma": weights["gamma"]})
    out = module(project("query"), project("key"), project("value"), grid)
    plane = out.squeeze(1).mT.unflatten(2, grid.size)  # (B, C, H, W)
    golden.check_call(x + (plane if inside else weights["gamma"] * plane), given)
    assert set(golden.named("grad_param.")) == {f"grad_param.{name}" for name in weights}
    for name, weight in weights.items():
        golden.check(f"grad_param.{name}", module.gamma.grad if inside and name == "gamma" else weight.grad)


@both_precisions
@of_case("lam_channel")
def test_formula_across_channels_equals_the_official_channel_attention(golden: Golden, dtype: torch.dtype) -> None:
    """No mechanism of ours, since it attends to channels: the formula alone is held to the reference."""
    given = golden.inputs(dtype)
    gamma = golden.tensors["param.gamma"].to(dtype, copy=True).requires_grad_()
    (x,) = given
    out = naive_channels(x.flatten(2).mT, golden.constructor["eps"], norm_eps=0.0)
    golden.check_call(x + gamma * out.mT.unflatten(2, x.shape[2:]), given)
    golden.check("grad_param.gamma", gamma.grad)


# The formula


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "taylor", **options}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-10)


@pytest.mark.parametrize(("key_reduction", "want"), [(1, 8), (2, 4), (3, 2), (8, 1)])
def test_reduction_narrows_the_keys(key_reduction: int, want: int) -> None:
    grid = Grid((9, 11))
    module = mechanism({"name": "taylor", "key_reduction": key_reduction}, grid)
    q, k, v, _ = inputs(module, grid)
    assert q.shape[-1] == k.shape[-1] == module.rank_bound(grid) - 1 == want
    assert torch.equal(module(q, k, v, grid), mechanism("taylor", grid, key_dim=want)(q, k, v, grid))


@pytest.mark.parametrize("key_dim", [3, 12])
def test_equals_formula_with_keys_of_another_width(key_dim: int) -> None:
    module = mechanism("taylor", GRIDS[0], key_dim=key_dim)
    given = inputs(module, GRIDS[0], grad=True)
    want = naive(module, given.q, given.k, given.v)
    assert_same_gradients(given(module, GRIDS[0]), want, given.tensors, 1e-10)


@pytest.mark.parametrize("options", [{}, OPTIONS[-1]], ids=str)
def test_gradients_are_those_of_finite_differences(options: dict[str, object]) -> None:
    grid = Grid((2, 3), kv_size=(1, 4))
    module = mechanism({"name": "taylor", **options}, grid, dim=6, num_heads=2)
    q, k, v, _ = inputs(module, grid, batch=1, grad=True)
    given = (q, k, v, *module.parameters())
    assert torch.autograd.gradcheck(lambda q, k, v, *_: module(q, k, v, grid), given)


def naive_channels(x: Tensor, eps: float, norm_eps: float) -> Tensor:
    """`o_c = (sum_c' v_c' + sum_m (v_c . k_m) q_m) / (N + k_c . (sum_m q_m + eps))`, rows being channels."""
    v = x.mT  # (B, C, N)
    qk = naive_unit(x, norm_eps).mT
    tokens, channels = v.shape[2], range(v.shape[1])
    total = sum(qk[:, m] for m in channels) + eps  # (B, N)
    rows = []
    for c in channels:
        products = sum((v[:, c] * qk[:, m]).sum(-1, keepdim=True) * qk[:, m] for m in channels)
        rows.append((v.sum(1) + products) / (tokens + (qk[:, c] * total).sum(-1, keepdim=True)))
    return torch.stack(rows, dim=2)


# Claims of the paper


# Zero tokens, opposite keys, half precision


@pytest.mark.parametrize("norm_eps", [0.0, 1e-12])
def test_zero_query_gives_the_mean_and_zero_key_a_weight_of_one(norm_eps: float) -> None:
    """Where the reference gives NaN."""
    grid = Grid((3, 4))
    module = mechanism({"name": "taylor", "norm_eps": norm_eps}, grid)
    q, k, v, _ = inputs(module, grid)
    q[:, :, 0] = 0
    k[:, :, 1] = 0
    given = [x.requires_grad_() for x in (q, k, v)]
    out = module(*given, grid)
    assert_near(out[:, :, 0], v.mean(2), 1e-13)
    matrix = attention_matrix(module, q.detach(), k.detach(), grid)
    denominator = naive_unit(q, 1e-9) @ (naive_unit(k, 1e-9).sum(2) + module.eps).unsqueeze(-1) + 12
    assert_near(matrix[..., 1], 1 / denominator[..., 0], 1e-12)
    out.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("zero", ["qk", "qkv"])
def test_zeros_alone_give_the_mean_and_finite_gradients(dtype: torch.dtype, zero: str) -> None:
    grid = Grid((3, 4))
    module = mechanism({"name": "taylor", "gamma": True}, grid, dtype=dtype)
    given = inputs(module, grid, dtype=dtype)
    q, k, v = (torch.zeros_like(x) if name in zero else x for name, x in zip("qkv", given[:3], strict=True))
    given = [x.requires_grad_() for x in (q, k, v)]
    out = module(*given, grid)
    want = module.gamma.double() * v.double().mean(2, keepdim=True).expand_as(out)
    assert_near(out, want, 4 * torch.finfo(dtype).eps)
    out.float().sum().backward()
    assert all(x.grad.isfinite().all() for x in [*given, *module.parameters()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("sign", [1, -1])
def test_keys_all_opposite_to_a_query_stay_finite(dtype: torch.dtype, eps: float, sign: int) -> None:
    """All weights are 0 and so is the denominator, up to the term of eps, which has the sign of the query's sum."""
    grid = Grid((3, 4))
    module = mechanism({"name": "taylor", "eps": eps}, grid, dtype=dtype)
    given = inputs(module, grid, dtype=dtype)
    direction = sign * torch.linspace(0.3, 1.7, 8, dtype=dtype)
    q = (direction.expand_as(given.q) * 1).requires_grad_()
    k = (-direction.expand_as(given.k)).requires_grad_()
    out = module(q, k, given.v.requires_grad_(), grid)
    out.float().sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in (q, k, given.v))


# Initial values, errors


def test_gamma_begins_at_zero_and_learns() -> None:
    """The reference starts as the identity: the layer's input is added by the host."""
    grid = Grid((3, 4))
    module = TaylorAttention(24, 3, grid, gamma=True).double()
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {"gamma": (1,)}
    out = inputs(module, grid)(module, grid)
    assert (out == 0).all()
    out.sum().backward()
    assert module.gamma.grad.abs() > 1e-3
    assert not list(TaylorAttention(24, 3, grid).parameters())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("norm_epsilon", "norm_eps"),
        ("gama", "gamma"),
        ("normalization", "options: .*eps: float = 1e-06, norm_eps: float = 1e-12, gamma: bool = False"),
    ],
)
def test_unknown_option_is_refused(option: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"(?s)takes no option '{option}'.*{message}"):
        create_attention({"name": "taylor", option: 1}, dim=24, num_heads=3, grid=Grid((4, 4)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_reduction": 9}, "key_reduction=9 leaves no channel of the keys, which have 8 per head without it"),
        ({"key_reduction": 2, "key_dim": 4}, "key_dim=4 and key_reduction=2 both set the width of the keys"),
    ],
    ids=str,
)
def test_reduction_that_does_not_fit_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TaylorAttention(24, 3, Grid((4, 4)), **options)
