"""Mechanisms that know no places of tokens equal their N x M formulas, option by option, and their authors' code."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import Attention, AttentionLayer, Grid, UserError
from linvit.analysis import attention_matrix
from linvit.attention.cosformer import CosFormerAttention
from linvit.attention.efficient import EfficientAttention
from linvit.attention.flow import FlowAttention
from linvit.attention.hedgehog import HedgehogAttention
from linvit.attention.hydra import KERNELS, HydraAttention
from linvit.attention.linear import LinearAttention
from linvit.attention.poly_nl import PolyNLAttention
from linvit.attention.taylor import TaylorAttention
from linvit.attention.taylor_shift import TaylorShiftAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_formula, assert_near, formulas, inputs, mechanism

GRID = Grid((3, 5), kv_size=(2, 3), num_prefix=1)
GRIDS = [GRID, Grid((7, 9)), Grid((1, 7))]


# The formulas


def elu_plus_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, torch.exp(x))


def linear(module: LinearAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`sum_m (phi(q_n).phi(k_m)) v_m / (sum_m phi(q_n).phi(k_m) + eps)`; not normalised, the quotient is by
    `(N M)^(1/4)`."""
    relu = module.feature_map == "relu"
    q, k = (torch.clamp(x, min=0) + module.relu_eps if relu else elu_plus_one(x) for x in (q, k))
    weights = q @ k.mT
    total = weights.sum(-1, keepdim=True) + module.eps if module.normalize else (q.shape[2] * k.shape[2]) ** 0.25
    return weights / total @ v


def efficient(module: EfficientAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`sum_m (q_n.k_m) v_m` of features that are softmaxes over channels and over tokens, or scaled."""
    if module.normalization == "softmax":
        return (q.exp() / q.exp().sum(-1, keepdim=True)) @ (k.exp() / k.exp().sum(-2, keepdim=True)).mT @ v
    return q @ k.mT / k.shape[2] @ v


def unit(x: Tensor, norm_eps: float) -> Tensor:
    """Vectors of length one, or shorter where the length is below `norm_eps`."""
    norm = (x * x).sum(-1, keepdim=True) ** 0.5
    return x / torch.where(norm < norm_eps, norm_eps, norm)


def taylor(module: TaylorAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`gamma (1 + q_i.k_j) v_j / sum_j (1 + q_i.k_j)` with eps in the sum of the keys."""
    q, k = unit(q, module.norm_eps), unit(k, module.norm_eps)
    similarity = 1 + q @ k.mT
    total = similarity.sum(-1, keepdim=True) + module.eps * q.sum(-1, keepdim=True)
    return similarity / total @ v * (1 if module.gamma is None else module.gamma)


def taylor_shift(module: TaylorShiftAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`(a x^2 + b x + c) v / sum (a x^2 + b x + c)` of logits x."""
    if module.temperature is not None:
        q, k = module.temperature * unit(q, 0.0), unit(k, 0.0)
    x = q @ k.mT
    weights = module.a * x**2 + module.b * x + module.c
    want = weights @ v / weights.sum(-1, keepdim=True)
    return want * (grid.num_queries / q.shape[-1]) ** 0.5 if module.output_normalized else want


def hedgehog_features(module: HedgehogAttention, x: Tensor, name: str) -> Tensor:
    """Channel by channel, without the bound of 1e-12, which no feature of these tests reaches."""
    name = name if name in module.maps else "q"
    y = torch.einsum("bhnd,hdf->bhnf", x, module.maps[name].expand(module.num_heads, -1, -1))
    y = y + x if module.skip else y
    if module.joint:
        e = torch.exp(2 * torch.cat([y + module.biases[name], -y - module.biases[name]], -1))
        return e / e.sum(-1, keepdim=True)
    if module.activation == "exp_dim":
        both = [torch.exp(z) / torch.exp(z.max(-1, keepdim=True)[0]) for z in (y, -y)]
    else:
        both = [torch.exp(z) / torch.exp(z).sum(-1, keepdim=True) for z in (y, -y)]
    return both[0] if module.half_space else torch.cat(both, -1)


def hedgehog(module: HedgehogAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    weights = hedgehog_features(module, q, "q") @ hedgehog_features(module, k, "k").mT
    return weights / weights.sum(-1, keepdim=True) @ v


def cosformer(module: CosFormerAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    places = [torch.arange(x.shape[2], dtype=torch.float64) for x in (q, k)]
    distance = (places[0][:, None] - places[1]) / max(grid.num_queries, grid.num_keys)
    weights = q.clamp_min(0) @ k.clamp_min(0).mT * torch.cos(math.pi / 2 * distance)
    return weights @ v / weights.sum(-1, keepdim=True).clamp_min(module.eps)


def flow_of_head(module: FlowAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query by query and key by key: q (N, dk), k (M, dk), v (M, d)."""
    phi = torch.sigmoid if module.feature_map == "sigmoid" else elu_plus_one
    q, k, e, out = phi(q), phi(k), module.eps, module.eps_out
    incoming = torch.stack([1 / ((x + e).dot(k.sum(0) + e) + out) for x in q])
    outgoing = torch.stack([1 / ((y + e).dot(q.sum(0) + e) + out) for y in k])
    gets = sum(o * y for o, y in zip(outgoing, k, strict=True))
    gives = sum(i * x for i, x in zip(incoming, q, strict=True))
    gate = torch.stack([((x + e).dot(gets + e) + out) * len(q) / len(k) for x in q]).sigmoid()
    competition = torch.stack([((y + e).dot(gives + e) + out).clamp(-1, 1) for y in k]).exp()
    weights = len(k) * competition / competition.sum()
    return (gate * incoming)[:, None] * (q @ k.mT * weights) @ v


def flow(module: FlowAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    heads = [flow_of_head(module, q[b, h], k[b, h], v[b, h]) for b in range(len(q)) for h in range(q.shape[1])]
    return torch.stack(heads).unflatten(0, q.shape[:2])


def split(tokens: Tensor, heads: int) -> Tensor:
    """(B, N, C) -> (B, h, N, d)."""
    return tokens.unflatten(2, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """(B, h, N, d) -> (B, N, C)."""
    return x.transpose(1, 2).flatten(2)


def hydra(module: HydraAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`phi_q(q_n) * sum_t phi_k(k_t) * v_t` on tokens of all channels."""
    phi = {
        "l2": lambda x: x / torch.clamp((x * x).sum(2, keepdim=True).sqrt(), min=module.eps),
        "l1": lambda x: x / torch.clamp(x.abs().sum(2, keepdim=True), min=module.eps),
        "constant": lambda x: x / module.constant,
        "mean": lambda x: x / k.shape[2] ** 0.5,
        "identity": lambda x: x,
        "tanh": lambda x: (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x)),
        "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
        "relu": lambda x: torch.where(x > 0, x, 0),
        "softmax_tokens": lambda x: torch.exp(x) / torch.exp(x).sum(1, keepdim=True),
        "softmax_features": lambda x: torch.exp(x) / torch.exp(x).sum(2, keepdim=True),
    }
    gathered = (phi[module.kernel_k](merge(k)) * merge(v)).sum(1, keepdim=True)
    return split(phi[module.kernel_q](merge(q)) * gathered, q.shape[1])


def aft_simple(module: Any, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`act(q_n) * sum_t exp(k_t) v_t / sum_t exp(k_t)`, channel by channel."""
    gates = {
        "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
        "tanh": lambda x: (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x)),
        "relu": lambda x: torch.where(x > 0, x, 0),
        "identity": lambda x: x,
    }
    weights = torch.exp(k) / torch.exp(k).sum(2, keepdim=True)
    return gates[module.query_act](q) * (weights * v).sum(2, keepdim=True)


def poly_nl(module: PolyNLAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`q_n * mean_t k_t v_t`, or the sum; with alpha and beta `alpha q_n + beta` times that."""
    row = q * (k * v).sum(2, keepdim=True) / (k.shape[2] if module.reduce == "mean" else 1)
    return row if module.alpha is None else module.alpha * q + module.beta * row


NAMES = list(KERNELS)
CHANGED = {"a": 0.7, "b": -0.9, "c": 1.3, "output_normalized": True}
POLY: list[dict[str, Any]] = [{}, {"reduce": "sum"}, {"alpha_beta": True}]
RELU = {"feature_map": "relu"}
OPTIONS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "linear": (
        linear,
        [
            *({}, {"eps": 0.5}, {"key_dim": 3}, RELU, {**RELU, "relu_eps": 0.25}, {"normalize": False}),
            *({**RELU, "relu_eps": 1e-6, "eps": 0.0}, {**RELU, "normalize": False, "relu_eps": 0.25}),
        ],
    ),
    "efficient": (
        efficient,
        [{"normalization": kind, "key_dim": width} for kind in ("softmax", "scaling") for width in (None, 3, 12)],
    ),
    "taylor": (
        taylor,
        [
            *({}, {"eps": 0.0}, {"eps": 0.25}, {"norm_eps": 0.0}, {"norm_eps": 2.5}),  # above some of the norms
            *({"gamma": True}, {"gamma": True, "eps": 0.1, "norm_eps": 2.0}, {"key_dim": 3}, {"key_dim": 12}),
        ],
    ),
    "taylor_shift": (
        taylor_shift,
        [
            {"form": form, **options}
            for form in ("direct", "efficient")
            for options in ({}, CHANGED, {"normalize_input": False})
        ],
    ),
    "hedgehog": (
        hedgehog,
        [
            *({}, {"feature_dim": 3, "half_space": True}, {"activation": "exp_dim", "skip": True}),
            *({"tied": True, "init": "kaiming"}, {"joint": True, "feature_dim": 5}),
        ],
    ),
    "cosformer": (cosformer, [{}, {"eps": 2.0}]),
    "flow": (flow, [{}, {"eps_out": 0.0}, {"eps": 0.1, "eps_out": 0.2}, {"feature_map": "elu"}]),
    "hydra": (
        hydra,
        [
            *({"kernel_q": q, "kernel_k": k} for q, k in zip(NAMES, NAMES[3:] + NAMES[:3], strict=True)),
            {"eps": 5.0},  # above some of the L2 norms, below all L1 norms
            {"eps": 20.0, "kernel_q": "l1", "kernel_k": "l1"},
            {"constant": 0.25, "kernel_q": "constant", "kernel_k": "constant"},
        ],
    ),
    "aft_simple": (aft_simple, [{}, *({"query_act": act} for act in ("tanh", "relu", "identity"))]),
    "poly_nl": (poly_nl, [*POLY, *({**options, "project_q": True} for options in POLY)]),
}


@formulas({name: (naive, options, GRIDS) for name, (naive, options) in OPTIONS.items()})
def test_equals_formula(spec: dict[str, Any], grid: Grid, naive: Any) -> None:
    assert_formula(spec, grid, naive, 1e-9)


# The authors' code


@both_precisions
@of_case("lra_linear")
def test_linear_equals_nystromformers(golden: Golden, dtype: torch.dtype) -> None:
    """Without a denominator; the mask removes keys, and so do zeros in place of their values."""
    *given, mask = golden.inputs(dtype)
    q, k, v = given
    module = LinearAttention(q.shape[1] * q.shape[3], q.shape[1], grid := Grid((1, q.shape[2])), normalize=False)
    out = module(q, k, v * mask.detach()[:, None, :, None], grid)
    golden.check_qkv(out, given)


@both_precisions
@of_case("efficient_attention")
def test_efficient_equals_the_official_code(golden: Golden, dtype: torch.dtype) -> None:
    """1x1 convolutions around the mechanism, and the module's own residual."""
    official, leaves = golden.constructor, golden.leaves(dtype)
    (x,) = given = golden.inputs(dtype)
    grid, heads = Grid(tuple(x.shape[2:])), official["head_count"]

    def project(tensor: Tensor, name: str) -> Tensor:
        """(B, C, H, W) -> (B, C', H, W)."""
        return F.conv2d(tensor, leaves[f"{name}.weight"], leaves[f"{name}.bias"])

    q, k, v = (project(x, n).flatten(2).unflatten(1, (heads, -1)).mT for n in ("queries", "keys", "values"))
    module = EfficientAttention(official["value_channels"], heads, grid, key_dim=official["key_channels"] // heads)
    plane = module(q, k, v, grid).mT.flatten(1, 2).unflatten(2, grid.size)  # (B, C', H, W)
    golden.check_call(project(plane, "reprojection") + x, given)
    golden.check_leaves(leaves)


@both_precisions
@pytest.mark.parametrize("inside", [False, True], ids=["gamma-in-the-test", "gamma-in-the-mechanism"])
@of_case("lam_position", "maresunet_pam")
def test_taylor_equals_the_official_position_attention(golden: Golden, inside: bool, dtype: torch.dtype) -> None:
    """1x1 convolutions of C / 8 channels for queries and keys, one head, and `x + gamma * o`."""
    leaves = golden.leaves(dtype)
    (x,) = given = golden.inputs(dtype)
    grid = Grid(tuple(x.shape[2:]))

    def project(name: str) -> Tensor:
        """(B, C, H, W) -> (B, 1, N, C')."""
        plane = F.conv2d(x, leaves[f"{name}_conv.weight"], leaves[f"{name}_conv.bias"])
        return plane.flatten(2).mT.unsqueeze(1)

    dim, width = golden.constructor["in_places"], leaves["query_conv.bias"].shape[0]
    module = TaylorAttention(dim, 1, grid, key_dim=width, eps=golden.constructor["eps"], gamma=inside).to(dtype)
    own = {"gamma": leaves["gamma"]} if inside else {}
    out = torch.func.functional_call(module, own, (project("query"), project("key"), project("value"), grid))
    plane = out.squeeze(1).mT.unflatten(2, grid.size)  # (B, C, H, W)
    golden.check_call(x + (plane if inside else leaves["gamma"] * plane), given)
    golden.check_leaves(leaves)


@both_precisions
@of_case("taylor_shift_core")
def test_taylor_shift_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    """Whose direct form multiplies v in place and has no gradient with `output_normalized`."""
    official = {**golden.constructor, "form": golden.kwargs["form"]}
    given = golden.inputs(dtype)
    grid = Grid((1, given[0].shape[2]))
    module = TaylorShiftAttention(official.pop("dim"), official.pop("num_heads"), grid, **official).to(dtype)
    module.load_state_dict(golden.parameters())
    golden.check_call(module(*given, grid), given)
    golden.check_parameters(module, str)


@both_precisions
@of_case("taylor_shift", "flow_cv")
def test_layers_equal_their_references(golden: Golden, dtype: torch.dtype) -> None:
    (x,) = given = golden.inputs(dtype)
    if golden.meta["case"] == "flow_cv":
        (dim, heads), spec, size = golden.constructor.values(), {"name": "flow"}, (5, 7)
    else:
        dim, heads, size = golden.constructor["dim"], golden.constructor["num_heads"], (1, x.shape[1])
        spec = {"name": "taylor_shift", "output_normalized": golden.constructor["output_normalized"]}
    layer = AttentionLayer(dim, heads, Grid(size), attention=spec).to(dtype)

    def ours(name: str) -> str:
        return f"mechanism.{name}" if name == "temperature" else name

    layer.load_state_dict({ours(name): tensor for name, tensor in golden.parameters().items()})
    golden.check_call(layer(x, Grid(size)), given)
    golden.check_parameters(layer, ours)


@both_precisions
@of_case("hedgehog_core", "hedgehog_fla_core")
def test_hedgehog_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    official, leaves = golden.constructor, golden.leaves(dtype)
    heads, width, joint = official["num_heads"], official["head_dim"], "activation_name" not in official
    q, k, v = given = golden.inputs(dtype)
    grid = Grid((1, q.shape[2]), (1, k.shape[2]))
    module = HedgehogAttention(
        heads * width,
        heads,
        grid,
        feature_dim=official.get("feature_dim"),
        activation=official.get("activation_name", "softmax_dim"),
        half_space=not official.get("fullspace", True),
        skip=official.get("skip_connection", False),
        joint=joint,
    ).to(dtype)
    state = {}
    for name, leaf in leaves.items():
        letter = name.removeprefix("feature_map_")[0]
        if name.endswith("mlp.bias"):  # one number, which has no effect
            leaf.grad = torch.zeros_like(leaf)
        elif name.endswith("bias"):
            state[f"biases.{letter}"] = leaf
        else:
            state[f"maps.{letter}"] = leaf.mT[None] if joint else leaf
    assert state.keys() == module.state_dict().keys()
    golden.check_call(torch.func.functional_call(module, state, (q, k, v, grid)), given)
    golden.check_leaves(leaves)


@both_precisions
@of_case("flow_core", "flow_cv_core", "cosformer_core")
def test_mechanisms_without_parameters_equal_their_references(golden: Golden, dtype: torch.dtype) -> None:
    """Flowformer's code for images adds eps to the four products, too; its other code does not."""
    q, k, v = given = golden.inputs(dtype)
    grid = Grid((1, q.shape[2]), kv_size=(1, k.shape[2]))
    module: Attention
    if golden.meta["case"] == "cosformer_core":
        module = CosFormerAttention(golden.constructor["embed_dim"], golden.constructor["num_heads"], grid)
    else:
        eps_out = 1e-6 if golden.meta["case"] == "flow_cv_core" else 0.0
        module = FlowAttention(q.shape[1] * q.shape[3], q.shape[1], grid, eps_out=eps_out)
    golden.check_call(module(q, k, v, grid), given)


@both_precisions
@of_case("hydra")
@pytest.mark.parametrize("heads", [1, 4, 32])
def test_hydra_equals_the_papers_listing(golden: Golden, heads: int, dtype: torch.dtype) -> None:
    """The listing knows no heads; ours may have any number."""
    q, k, v = given = golden.inputs(dtype)
    grid = Grid((1, q.shape[1]))
    module = HydraAttention(q.shape[2], heads, grid, **golden.constructor).to(dtype)
    golden.check_call(merge(module(split(q, heads), split(k, heads), split(v, heads), grid)), given)


# Defaults of the papers


def test_defaults_are_the_papers() -> None:
    module = HydraAttention(24, 3, GRID)
    assert (module.kernel_q, module.kernel_k, module.host.norm, module.eps) == ("l2", "l2", "none", 1e-12)
    assert module.constant == math.sqrt(24)
    assert mechanism("aft_simple", GRID).query_act == "sigmoid"
    poly = PolyNLAttention(24, 3, GRID, alpha_beta=True)
    assert (poly.host.project, poly.reduce) == ("kv", "mean")
    assert {name: p.tolist() for name, p in poly.named_parameters()} == {"alpha": [1.0], "beta": [1.0]}
    gated = TaylorAttention(24, 3, GRID, gamma=True)
    assert {name: p.tolist() for name, p in gated.named_parameters()} == {"gamma": [0.0]}  # begins as the identity
    for name in ("hydra", "aft_simple", "poly_nl", "taylor"):
        assert not list(mechanism(name, GRID).parameters())


def test_hedgehog_begins_as_the_softmax_of_the_keys_channels() -> None:
    """With and without `skip`; kaiming's numbers are within the bounds of the published code."""
    x = torch.randn(1, 3, 6, 8)
    for skip in (False, True):
        phi = HedgehogAttention(24, 3, Grid((2, 3)), skip=skip).features(x, "k")
        assert torch.equal(phi, torch.cat([x.softmax(-1), (-x).softmax(-1)], -1))
    weight = HedgehogAttention(24, 3, Grid((2, 3)), init="kaiming").maps["q"]
    assert 0 < weight.abs().max() <= (6 / (8 * 8)) ** 0.5


# Vectors of zeros, large and small entries


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("kernel", "eps"), [("l2", 1e-12), ("l2", 0.0), ("l1", 0.0)])
def test_zero_tokens_give_zero_in_hydra_and_finite_gradients(kernel: str, eps: float, dtype: torch.dtype) -> None:
    """The published code divides by their norm."""
    module = mechanism({"name": "hydra", "kernel_q": kernel, "kernel_k": kernel, "eps": eps}, GRID, dtype=dtype)
    given = inputs(module, GRID, dtype=dtype)
    given.q[0, :, 3] = 0
    given.k[1] = 0
    given = given.map(lambda x: x.requires_grad_())
    out = given(module, GRID)
    out.float().sum().backward()
    assert (merge(out)[[0, 1, 1], [3, 0, 15]] == 0).all()
    assert all(x.isfinite().all() for x in (out, *(x.grad for x in given.tensors)))


@pytest.mark.parametrize("norm_eps", [0.0, 1e-12])
def test_zero_query_gives_the_mean_in_taylor_and_zero_key_a_weight_of_one(norm_eps: float) -> None:
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
    denominator = unit(q, 1e-9) @ (unit(k, 1e-9).sum(2) + module.eps).unsqueeze(-1) + 12
    assert_near(matrix[..., 1], 1 / denominator[..., 0], 1e-12)
    out.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "spec", [{"name": "taylor"}, *({"name": "taylor_shift", "form": form} for form in ("direct", "efficient"))], ids=str
)
def test_zeros_alone_give_the_mean_and_finite_gradients(spec: dict[str, str], dtype: torch.dtype) -> None:
    module = mechanism(spec, grid := Grid((3, 4)), dtype=dtype)
    given = inputs(module, grid, dtype=dtype)
    q, k, v = (x.requires_grad_() for x in (torch.zeros_like(given.q), torch.zeros_like(given.k), given.v))
    out = module(q, k, v, grid)
    assert_near(out, v.double().mean(2, keepdim=True).expand_as(out), 4 * torch.finfo(dtype).eps)
    out.float().sum().backward()
    assert all(x.grad.isfinite().all() for x in [q, k, v, *module.parameters()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("eps", "sign"), [(0.0, 1), (1e-6, 1), (1e-6, -1)])
def test_keys_all_opposite_to_a_query_stay_finite_in_taylor(dtype: torch.dtype, eps: float, sign: int) -> None:
    """All weights are 0 and so is the denominator, up to the term of eps, which has the sign of the query's sum."""
    module = mechanism({"name": "taylor", "eps": eps}, grid := Grid((3, 4)), dtype=dtype)
    given = inputs(module, grid, dtype=dtype)
    direction = sign * torch.linspace(0.3, 1.7, 8, dtype=dtype)
    q = (direction.expand_as(given.q) * 1).requires_grad_()
    k = (-direction.expand_as(given.k)).requires_grad_()
    out = module(q, k, given.v.requires_grad_(), grid)
    out.float().sum().backward()
    assert all(x.isfinite().all() for x in (out, q.grad, k.grad, given.v.grad))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_large_entries_of_efficient_choose_one_channel_and_one_key_each(dtype: torch.dtype) -> None:
    """With thousands between the entries the softmaxes are choices; the exponentials themselves would overflow."""
    module = mechanism("efficient", grid := Grid((3, 4)), dtype=dtype)
    q, k, v, _ = inputs(module, grid, dtype=dtype)
    levels_q, levels_k = q.argsort(-1).argsort(-1), k.argsort(-2).argsort(-2)  # 0, 1, 2 ... without ties
    given = [x.to(dtype).requires_grad_() for x in (2048 * levels_q, 2048 * levels_k, v)]
    out = module(*given, grid)
    channel, key = levels_q.argmax(-1), levels_k.argmax(-2)  # (B, h, N), (B, h, dk)
    chosen = key.gather(2, channel)[..., None].expand_as(out)  # the key that the query's channel points at
    assert torch.equal(out, v.gather(2, chosen))
    out.float().square().sum().backward()
    assert all(x.grad.isfinite().all() for x in given)


def test_queries_of_linear_without_a_positive_entry_give_zero_or_the_mean() -> None:
    grid = Grid((3, 4))
    zero = mechanism({"name": "linear", "feature_map": "relu"}, grid)
    mean = mechanism({"name": "linear", "feature_map": "relu", "relu_eps": 1e-6, "eps": 0.0}, grid)
    q, k, v, _ = inputs(zero, grid)
    q[:, :, 0] = -1
    k = torch.ones_like(k)
    assert (zero(q, k, v, grid)[:, :, 0] == 0).all()
    assert_near(mean(q, k, v, grid)[:, :, 0], v.mean(2), 1e-12)


def test_queries_of_linear_far_below_zero_keep_their_digits() -> None:
    """As a sum, `elu(x) + 1` is 0 there in float32."""
    of = mechanism("linear", GRID, dtype=torch.float32)
    q, k, v = inputs(of, GRID)[:3]
    q = q - 18
    assert_near(of(q.float(), k.float(), v.float(), GRID), linear(of, q, k, v, GRID), 1e-5)


@pytest.mark.parametrize(("reduce", "outer", "inner"), [("sum", 1e-3, 300.0), ("mean", 1e3, 1e-3)])
def test_products_of_poly_nl_leave_the_range_of_float16(reduce: str, outer: float, inner: float) -> None:
    """Where the result does not."""
    grid = Grid((56, 56))
    module = mechanism({"name": "poly_nl", "reduce": reduce}, grid, dim=8, num_heads=2)
    scaled = (scale * x for scale, x in zip((outer, inner, inner), inputs(module, grid), strict=False))
    q, k, v = (x.half() for x in scaled)
    assert_near(module(q, k, v, grid), poly_nl(module, q.double(), k.double(), v.double(), grid), 2e-3)


# The width of the keys, factors, masks, refusals


@pytest.mark.parametrize(
    ("name", "option", "value", "width"),
    [("efficient", "key_ratio", 0.3, 2), ("efficient", "key_ratio", 0.07, 1), ("taylor", "key_reduction", 3, 2)],
)
def test_options_set_the_width_of_the_keys(name: str, option: str, value: float, width: int) -> None:
    grid = Grid((9, 11))
    module = mechanism({"name": name, option: value}, grid)
    q, k, v, _ = inputs(module, grid)
    assert q.shape[-1] == k.shape[-1] == module.rank_bound(grid) - (name == "taylor") == width
    assert torch.equal(module(q, k, v, grid), mechanism({"name": name, "key_dim": width}, grid)(q, k, v, grid))


def test_factors_and_matrix_of_linear_without_a_denominator() -> None:
    """`Q K^T / (N M)^(1/4)`."""
    module = mechanism({"name": "linear", "normalize": False}, GRID)
    given = inputs(module, GRID)
    matrix = module.features(given.q) @ module.features(given.k).mT / (GRID.num_queries * GRID.num_keys) ** 0.25
    assert_near(attention_matrix(module, given.q, given.k, GRID), matrix, 1e-12)
    left, right = module.factors(given.q, given.k, GRID)
    assert_near(left @ right.mT, matrix, 1e-12)


def test_taylor_shift_has_factors_in_both_forms_and_takes_the_cheaper_one() -> None:
    """At 45 features from 45 tokens on, whatever grid the layer was made for."""
    for form in ("direct", "efficient"):
        module = mechanism({"name": "taylor_shift", "form": form}, GRID)
        given = inputs(module, GRID)
        left, right = module.factors(given.q, given.k, GRID)
        assert left.shape[-1] == module.rank_bound(Grid((10, 10))) == 45
        assert_near(left @ right.mT @ given.v, given(module, GRID), 1e-12)
    module = TaylorShiftAttention(24, 3, Grid((7, 7)))
    assert [module._is_direct(Grid((1, tokens))) for tokens in (44, 46)] == [True, False]
    assert module._is_direct(Grid((10, 10), (4, 4)))


@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_weights_of_taylor_shift_leave_a_key_out_by_a_mask(form: str) -> None:
    grid = Grid((2, 3))
    mask = torch.tensor([[True, True, False, True, True, True]])
    module = mechanism({"name": "taylor_shift", "form": form}, grid)
    q, k, v, _ = inputs(module, grid, batch=1)
    want = mechanism({"name": "taylor_shift", "form": form}, grid)(
        q, k[:, :, mask[0]], v[:, :, mask[0]], Grid((2, 3), (1, 5))
    )
    assert_near(module(q, k, v, grid, mask=mask), want, 1e-12)
    assert F.mse_loss(module(q, k, v, grid), want) > 1e-6


def test_keys_do_not_compete_in_flow_where_they_are_fewer_than_the_queries() -> None:
    """Their mean flow is N / M, which is clamped to 1 for all of them: the softmax over them is uniform."""
    module = mechanism("flow", GRID)
    q, k, v, _ = inputs(module, GRID)
    left, right = module.factors(q, k, GRID)
    assert_near(right, k.sigmoid(), 1e-12)
    assert_near(module(q, k, v, GRID), left @ (k.sigmoid().mT @ v), 1e-12)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("efficient", {"key_ratio": 0.05}, "key_ratio=0.05 leaves no channel of the keys, which have 8 per head"),
        ("efficient", {"key_dim": 4, "key_ratio": 0.5}, "key_dim=4 and key_ratio=0.5 both set the width"),
        ("taylor", {"key_reduction": 9}, "key_reduction=9 leaves no channel of the keys, which have 8 per head"),
        ("taylor", {"key_dim": 4, "key_reduction": 2}, "key_dim=4 and key_reduction=2 both set the width"),
        ("taylor_shift", {"b": 2.0}, r"negative weights; take c of at least b\^2 / 4 a = 2"),
        ("hedgehog", {"skip": True, "feature_dim": 4}, "the keys' 8 channels to feature_dim=4; make them equal"),
        ("hedgehog", {"joint": True, "activation": "exp_dim"}, "joint is for activation=softmax_dim, skip=false"),
    ],
)
def test_what_does_not_go_together_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mechanism({"name": name, **options}, Grid((4, 4)))
