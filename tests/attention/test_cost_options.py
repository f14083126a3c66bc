"""The declared cost of every option that changes it, against the operations that run, counted one by one."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linvit import Grid
from linvit.registry import attentions
from tests.helpers import assert_cost, inputs, mechanism

GRID = Grid((12, 14), num_prefix=1)
REDUCED = Grid((12, 14), kv_size=(6, 7), num_prefix=1)

PER_OUTPUT = [
    *("add", "sub", "rsub", "mul", "div", "neg", "square", "clamp", "clamp_min", "relu", "threshold", "maximum"),
    *("gt", "where", "masked_fill"),
]
PER_INPUT = ["sum", "mean", "amax"]
TRANSCENDENTAL = ["exp", "log", "sqrt", "pow", "tanh", "elu"]


SLACK = 10
"""Operations per token and head that a mechanism may leave out; one per channel would be 32."""


class Counting(TorchDispatchMode):
    """Counts single-element operations the way `Cost` defines them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")  # in place or private alike
        if name in PER_OUTPUT:
            self.counts["elementwise"] += out.numel() * (2 if kwargs else 1)  # add(..., alpha=...) multiplies, too
        elif name in PER_INPUT:
            self.counts["elementwise"] += args[0].numel()
        elif name == "linalg_vector_norm":  # squares (or absolute values), sums, one root each
            self.counts["elementwise"] += 2 * args[0].numel()
            self.counts["transcendental"] += out.numel()
        elif name in ("softmax", "safe_softmax"):  # maximum, its difference, the exponential, sum, quotient
            self.counts["elementwise"] += 4 * out.numel()
            self.counts["transcendental"] += out.numel()
        elif name in TRANSCENDENTAL:
            self.counts["transcendental"] += args[0].numel()
        elif name == "sigmoid":  # 1 / (1 + exp(-x))
            self.counts["elementwise"] += 2 * out.numel()
            self.counts["transcendental"] += out.numel()
        elif name == "logsumexp":  # maximum, its difference, the exponential, sum
            self.counts["elementwise"] += 3 * args[0].numel()
            self.counts["transcendental"] += args[0].numel()
        elif name == "native_layer_norm":  # sum, difference, square, sum, quotient, weight, bias
            self.counts["elementwise"] += 7 * args[0].numel()
        elif name == "convolution":
            self.counts["elementwise"] += 0 if args[2] is None else out.numel()
        elif name == "scaled_dot_product_flash_attention_for_cpu":
            pairs = args[0].shape[:3].numel() * args[1].shape[2]
            self.counts["elementwise"] += args[0].numel() + 4 * pairs
            self.counts["transcendental"] += pairs
        return out


CASES = {
    "softmax": [{}, {"fused": False}],
    "linear": [
        {},
        {"feature_map": "relu"},
        {"feature_map": "relu", "relu_eps": 1e-6},
        {"normalize": False},
        {"normalize": False, "feature_map": "relu"},
    ],
    "focused": [
        {},
        {"focus": False},
        {"norm_scope": "per_head"},
        {"pos_enc": False},
        {"learn_scale": False},
        {"dwc": False},
        {"dwc_kernel": 3},
        {"stable_power": False},
        {"denominator": "sum"},
        {"sr_interp": "bilinear2d"},
    ],
    "hydra": [
        {"kernel_q": "l2", "kernel_k": "identity"},
        {"kernel_q": "identity", "kernel_k": "l1"},
        {"kernel_q": "constant", "kernel_k": "mean"},
        {"kernel_q": "mean", "kernel_k": "constant"},
        {"kernel_q": "tanh", "kernel_k": "sigmoid"},
        {"kernel_q": "sigmoid", "kernel_k": "relu"},
        {"kernel_q": "relu", "kernel_k": "tanh"},
        {"kernel_q": "softmax_tokens", "kernel_k": "softmax_features"},
        {"kernel_q": "softmax_features", "kernel_k": "softmax_tokens"},
        {"post_norm": "ln"},
    ],
    "efficient": [{}, {"normalization": "scaling"}],
    "linear_angular": [
        {},
        {"half": "mean"},
        {"out_norm": False},
        {"dconv": "grid2d"},
        {"res_kernel_size": 5},
        {"sparse_reg": True},
    ],
    "enhanced_linear": [
        {},
        {"scales": []},
        {"scales": [3, 5]},
        {"agg_bias": True},
        {"head_dim": 20, "heads_ratio": 1.5},
    ],
    "taylor": [{}, {"gamma": True}],
    "performer": [{}, {"kernel": "relu"}, {"kernel": "exp"}, {"kernel": "none"}, {"nb_features": 40}],
    "linformer": [
        {},
        {"k": 9, "share": "none"},
        {"k": 9, "share": "kv"},
        {"k": 9, "one_kv_head": True},
        {"k": 9, "one_kv_head": True, "share": "none"},
    ],
    "nystrom": [{}, {"num_landmarks": 9}, {"num_landmarks": 9, "conv_kernel": 5}, {"pinv_iters": 2}],
    "aft_simple": [{"query_act": name} for name in ("sigmoid", "tanh", "relu", "identity")],
    "poly_nl": [{}, {"reduce": "sum"}, {"alpha_beta": True}, {"project_q": True}],
}


@pytest.mark.parametrize("key_dim", [None, 20])
@pytest.mark.parametrize("grid", [GRID, REDUCED], ids=["full", "reduced"])
@pytest.mark.parametrize(("name", "options"), [(n, o) for n, options in CASES.items() for o in options], ids=str)
def test_declared_cost_is_what_runs(name: str, options: dict[str, object], grid: Grid, key_dim: int | None) -> None:
    """Products to the last; the rest up to what is done once per token and head, a few operations of each kind."""
    if not attentions.get(name).narrow_keys or name in ("softmax", "linformer"):
        key_dim = None  # the fused kernel wants one width, and without it torch scales k, too
    if name in ("linear_angular", "poly_nl") or options.get("conv_kernel"):
        grid = grid._replace(kv_size=None)
    module = mechanism({"name": name, **options}, grid, dim=96, key_dim=key_dim)
    assert_cost(module, grid)
    given = inputs(module, grid, batch=1)
    with Counting() as ran, torch.no_grad():
        given(module, grid)
    cost = module.cost(grid)
    slack = SLACK * module.num_heads * (grid.num_queries + grid.num_keys)
    assert abs(cost.elementwise - ran.counts["elementwise"]) <= slack
    assert abs(cost.transcendental - ran.counts["transcendental"]) <= slack
