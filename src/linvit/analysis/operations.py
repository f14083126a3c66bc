"""Counts the operations and the stored bytes of one forward pass, of any module and of any mechanism.

torch's `FlopCounterMode` counts matrix products, convolutions and fused attention. One rule covers the rest: an
operator that computes counts one operation per element of its largest tensor, a Fourier transform of n numbers log2 n
(rounded up) per number. Inverses and singular values count the multiply-accumulates of the usual algorithms (Golub &
Van Loan, "Matrix Computations", 4th edition: Chapter 3 and Section 8.6); those of singular values are an estimate,
because they are found by iteration.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from linvit.attention.base import Attention, Grid
from linvit.image_size import image_size
from linvit.registry import Spec, attentions

FREE = frozenset(
    [
        *("_to_copy", "_unsafe_view", "bernoulli", "cat", "clone", "complex", "constant_pad_nd", "copy_"),
        *("diag_embed", "embedding", "empty_like", "fill_", "flip", "full_like", "gather", "im2col", "index"),
        *("index_put_", "index_select", "linalg_check_errors", "masked_select", "new_empty", "new_empty_strided"),
        *("new_full", "new_ones", "new_zeros", "nonzero", "ones_like", "pixel_shuffle", "pixel_unshuffle"),
        *("rand_like", "randn_like", "reflection_pad1d", "reflection_pad2d", "repeat", "replication_pad1d"),
        *("replication_pad2d", "resize_", "roll", "scatter", "select_scatter", "slice_scatter", "stack", "tril"),
        *("triu", "unsafe_split", "upsample_nearest1d", "upsample_nearest2d", "zero_", "zeros_like"),
    ]
)
"""Operators that move, cast or select elements; like views, they count nothing."""

COUNTED_BY_TORCH = frozenset(["addmm", "baddbmm", "bmm", "convolution", "mm"])

ALGORITHMS: dict[str, Callable[[int, int], int]] = {
    "linalg_inv_ex": lambda m, n: n**3,
    "linalg_pinv": lambda m, n: 8 * m * n**2 + 4 * n**3,
    "_linalg_svd": lambda m, n: 7 * m * n**2 + 4 * n**3,
}
"""Multiply-accumulates for an m x n matrix, m >= n."""


class Operations(NamedTuple):
    """Operations of one forward pass.

    Attributes:
        matmul: Multiply-accumulates (MACs) in matrix products, convolutions, matrix factorisations and Euclidean
            distances; FLOPs are twice that. Except for the last two, half of what torch's `FlopCounterMode` counts.
        elementwise: Results of every other operator that computes, such as sums, exponentials and norms, one per
            element of its largest tensor. A softmax counts as much as a sum.
        parameters: Learnable parameters of the module.
    """

    matmul: int
    elementwise: int
    parameters: int

    @property
    def total(self) -> int:
        """All operations, a MAC counted once."""
        return self.matmul + self.elementwise

    @property
    def flops(self) -> int:
        """Floating-point operations: a MAC counts two, every other operation one."""
        return self.total + self.matmul


def count_operations(module: nn.Module, *inputs: Any, **options: Any) -> Operations:
    """Counts the operations of one forward pass of a module in evaluation mode.

    Views, copies, casts and indexing count nothing. Softmax attention is computed and counted by its formula on every
    device, so its whole matrix is stored. A module and inputs on the meta device are counted
    without arithmetic and without memory.

    Args:
        module: Any module: a mechanism, a layer, a model.
        inputs: Its arguments. The operations of the whole batch are counted.
        options: Keyword arguments of the call.
    """
    training = [part for part in module.modules() if part.training]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.eval().requires_grad_(False)  # torch's counter fails for modules that are called with views of parameters
    try:
        products, others = flop_counter(), _Counter()
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), products, others:
            module(*inputs, **options)
    finally:
        for part in training:
            part.training = True
        for parameter in trained:
            parameter.requires_grad = True
    matmul = products.get_total_flops() // 2 + others.matmul
    return Operations(matmul, others.elementwise, num_parameters(module))


def attention_cost(attention: Spec, grid: Grid, *, dim: int, num_heads: int, key_dim: int | None = None) -> Operations:
    """Counts the operations of a mechanism on one image, all heads, without the host's projections.

    The mechanism is counted on the meta device, without arithmetic, or on the CPU if it cannot run there. To count a
    mechanism that is already built, pass it to `count_operations` with its inputs.

    Args:
        attention: A name, or a mapping with `name` and options.
        grid: Positions of the tokens; also the nominal grid of the mechanism.
        dim: Channels C over all heads.
        num_heads: Heads h.
        key_dim: Channels of q and k per head; None means C / h.

    Raises:
        UserError: If there is no such mechanism, or it rejects its options or the grid.

    Example:
        >>> from linvit import Grid
        >>> from linvit.analysis import attention_cost
        >>> attention_cost("linear", Grid((14, 14)), dim=192, num_heads=3).matmul  # 2 N C d + N C
        4854528
    """
    mechanism: Attention = attentions.create(attention, dim=dim, num_heads=num_heads, grid=grid, key_dim=key_dim)
    inputs, extra = make_inputs(mechanism, grid, partial(torch.zeros, 1))
    return count_on_meta(mechanism, *inputs, **extra)


def make_inputs(
    mechanism: Attention, grid: Grid, make: Callable[..., Tensor]
) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Returns q, k, v and the grid, and the mechanism's other inputs by name; `make` adds the batch dimension."""
    q = make(mechanism.key_heads, grid.num_queries, mechanism.key_dim)
    k = q if mechanism.host.project == "qv" else make(mechanism.key_heads, grid.num_keys, mechanism.key_dim)
    v = make(mechanism.num_heads, grid.num_keys, mechanism.head_dim)
    return (q, k, v, grid), ({"x": make(grid.num_queries, mechanism.input_dim)} if mechanism.host.input else {})


def count_on_meta(module: nn.Module, *inputs: Any, **options: Any) -> Operations:
    """Counts like `count_operations`, but on the meta device, without arithmetic, if the module can run there."""

    def moved(tree: Any) -> Any:
        return tree_map_only(Tensor, lambda x: x.detach().to("meta"), tree)

    try:
        return count_operations(copy.deepcopy(module).to("meta"), *moved(inputs), **moved(options))
    except (NotImplementedError, RuntimeError):  # for example a branch on a number's value
        return count_operations(module, *inputs, **options)


def kept_for_backward(work: Callable[[], Any], *modules: nn.Module) -> int:
    """Returns the bytes that autograd stores for the backward pass of `work`, without those of the modules."""
    own = {
        tensor.untyped_storage().data_ptr()
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    saved: WeakSet[_Saved] = WeakSet()  # tensors that a forward pass drops again do not count

    def pack(tensor: Tensor) -> _Saved:
        held = _Saved(tensor)
        saved.add(held)
        return held

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda held: held.tensor):
        result = work()
    storages = [held.tensor.untyped_storage() for held in saved if held.tensor.layout == torch.strided]
    del result
    kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for place, size in kept.items() if place not in own)


class _Saved:
    """Tensor that autograd stores as long as its graph exists."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def macs(model: nn.Module, img_size: int | Sequence[int] = 224, in_chans: int = 3) -> int:
    """Counts the multiply-accumulates of one image's forward pass in evaluation mode, as papers report them.

    Counted are convolutions, linear layers and matrix products, including both of softmax attention, 1 per multiplied
    pair; not norms, activations, softmax, pooling, interpolation and element-wise products (Hydra has only these).
    `count_operations` also counts these.

    A model on the meta device is counted there, without arithmetic.

    Args:
        model: Called with images (1, in_chans, H, W).
        img_size: Side, or (H, W).
        in_chans: Image channels.
    """
    parameter = next(model.parameters())
    return count_operations(model, parameter.new_zeros(1, in_chans, *image_size(img_size))).matmul


def num_parameters(module: nn.Module) -> int:
    """Returns the number of learnable parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def flop_counter() -> FlopCounterMode:
    """Returns torch's counter, which in torch 2.11 fails at products with an `out_dtype`."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.bmm: _flops_of_products})


def _flops_of_products(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b[-1]


class _Counter(TorchDispatchMode):
    """Adds up the operations of all operators that torch's counter leaves out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.matmul = self.elementwise = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given, made = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in ((args, kwargs), out)
        )
        if name in ALGORITHMS:
            *batch, rows, columns = args[0].shape
            self.matmul += math.prod(batch) * ALGORITHMS[name](max(rows, columns), min(rows, columns))
        elif name == "_euclidean_dist":  # a a^T - 2 a b^T + b b^T
            self.matmul += out.numel() * args[0].shape[-1]
            self.elementwise += out.numel()
        elif name in ("_fft_r2c", "_fft_c2r"):
            real = args[0] if name == "_fft_r2c" else out
            length = math.prod(real.shape[dim] for dim in args[1])
            self.elementwise += real.numel() * (length - 1).bit_length()
        elif given and made and not func.is_view and name not in FREE | COUNTED_BY_TORCH:
            self.elementwise += max(tensor.numel() for tensor in given + made)
        return out
