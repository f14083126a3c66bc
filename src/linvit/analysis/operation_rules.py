"""What one call of a torch operator counts, beside the products and convolutions that torch counts by itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from linvit.analysis.operation_formulas import FORMULAS, Count

FREE = frozenset(
    [
        *("bernoulli", "cat", "clone", "complex", "constant_pad_nd", "copy", "diag_embed", "embedding"),
        *("empty_like", "fill", "flip", "full_like", "gather", "im2col", "index", "index_put", "index_select"),
        *("linalg_check_errors", "local_scalar_dense", "masked_select", "new_empty", "new_empty_strided"),
        *("new_full", "new_ones", "new_zeros", "nonzero", "ones_like", "pixel_shuffle", "pixel_unshuffle"),
        *("rand_like", "randn_like", "reflection_pad1d", "reflection_pad2d", "repeat", "replication_pad1d"),
        *("replication_pad2d", "resize", "roll", "scatter", "select_scatter", "slice_scatter", "stack"),
        *("to_copy", "tril", "triu", "unsafe_split", "unsafe_view", "upsample_nearest1d"),
        *("upsample_nearest2d", "zero", "zeros_like"),
    ]
)
"""Operators that move, cast or choose elements. Views, and operators without a tensor, count nothing either."""

TORCH_COUNTS = frozenset(["bmm", "cudnn_convolution", "mm", "scaled_mm"])
"""Operators that are nothing but what torch counts."""

PER_OUTPUT = {
    **dict.fromkeys(
        [
            *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "digamma", "erf"),
            *("erfc", "erfinv", "exp", "exp2", "expm1", "lgamma", "log", "log10", "log1p", "log2"),
            *("logaddexp", "rsqrt", "sin", "sinc", "sinh", "special_entr", "sqrt", "tan", "tanh"),
        ],
        (0, 1),
    ),
    "addmm": (1, 0),
    "addmv": (1, 0),
    "baddbmm": (1, 0),
    "cumprod": (1, 0),
    "cumsum": (1, 0),
    "elu": (1, 1),
    "gelu": (4, 1),  # x * 0.5 * (1 + erf(x / sqrt(2)))
    "glu": (3, 1),
    "grid_sampler_2d": (7, 0),
    "hardsigmoid": (4, 0),
    "hardswish": (5, 0),
    "lerp": (3, 0),
    "log_sigmoid_forward": (1, 2),
    "masked_fill": (1, 0),
    "mish": (2, 3),
    "sigmoid": (2, 1),  # 1 / (1 + exp(-x))
    "silu": (3, 1),
    "softplus": (2, 2),
    "threshold": (1, 0),
    "upsample_bicubic2d": (31, 0),  # 16 products and their sum
    "upsample_bilinear2d": (7, 0),
    "upsample_linear1d": (3, 0),
}
"""(Elementwise operations, transcendental functions) per element of the output; (1, 0) where nothing is said."""

PER_INPUT = {
    **dict.fromkeys(["adaptive_avg_pool2d", "all", "any", "cummax", "cummin", "mean", "prod", "sum", "topk"], (1, 0)),
    **dict.fromkeys(["amax", "amin", "argmax", "argmin", "max", "min"], (1, 0)),
    **dict.fromkeys(["log_softmax", "safe_softmax", "softmax"], (4, 1)),  # maximum, its difference, sum, quotient
    "logsumexp": (3, 1),
    **dict.fromkeys(["std", "std_mean", "var", "var_mean"], (4, 0)),  # sum, difference, square, sum
    "linalg_vector_norm": (2, 0),  # squares or absolute values, and their sum
    **dict.fromkeys(  # mean, deviation, weight, bias
        [
            *("batch_norm_with_update", "cudnn_batch_norm", "native_batch_norm", "native_batch_norm_legit"),
            *("native_batch_norm_legit_no_training",),
        ],
        (4, 0),
    ),
}
"""The same per element of the first input."""

FUNCTION_OF_THE_SUM = frozenset(["linalg_vector_norm", "logsumexp", "std", "std_mean"])
"""Reductions that end in one root or logarithm per element of the output."""


def operations_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> tuple[Count, bool]:
    """What one call of an operator counts, and whether a rule describes the operator.

    Args:
        func: The operator, as a `TorchDispatchMode` gets it.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        out: What it returned.
    """
    name = func.overloadpacket.__name__.strip("_")  # an operator in place, or a private one, counts like the other
    given, made = _tensors((args, kwargs)), _tensors(out)
    if func.is_view or not given or not made or name in FREE | TORCH_COUNTS:
        return Count(), True
    if name in FORMULAS:
        return FORMULAS[name](args, kwargs, made), True
    if name in PER_INPUT and not (name in ("max", "min") and len(given) == 2):  # of two tensors: pointwise
        size, (elementwise, transcendental) = given[0].numel(), PER_INPUT[name]
        ends = made[0].numel() if name in FUNCTION_OF_THE_SUM else 0
        return Count(0, elementwise * size, transcendental * size + ends), True
    size, (elementwise, transcendental) = made[0].numel(), PER_OUTPUT.get(name, (1, 0))
    known = name in PER_OUTPUT or torch.Tag.pointwise in func.tags
    return Count(0, elementwise * size, transcendental * size), known


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
