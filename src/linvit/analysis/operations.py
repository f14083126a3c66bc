"""Operations of one forward pass, counted while it runs: of any module, and of any attention mechanism."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from linvit.analysis.operation_rules import operations_of
from linvit.attention.base import Attention, Grid
from linvit.image_size import image_size
from linvit.registry import Spec, attentions


class Operations(NamedTuple):
    """Operations of one forward pass.

    Attributes:
        matmul: Multiply-accumulates (MACs) in matrix products, convolutions, matrix factorisations and Euclidean
            distances; FLOPs are twice that. But for the last two it is half of what torch's `FlopCounterMode` counts.
        elementwise: Additions, multiplications, divisions, comparisons and sums of single elements.
        transcendental: exp, log, sqrt, pow, tanh and the like.
        parameters: Learnable parameters of the module.
        unknown: Operators that no rule describes, such as a plug-in's own kernels. Each of their calls counts one
            elementwise operation per element of the output.
    """

    matmul: int
    elementwise: int
    transcendental: int
    parameters: int
    unknown: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All operations, a MAC counted once."""
        return self.matmul + self.elementwise + self.transcendental

    @property
    def flops(self) -> int:
        """Floating-point operations: a MAC counts two, every other operation one."""
        return self.total + self.matmul


def count_operations(module: nn.Module, *inputs: Any, **options: Any) -> Operations:
    """Counts the operations of one forward pass of a module in evaluation mode.

    Views, copies, casts and indexing count nothing. Softmax attention is computed and counted by its formula, whatever
    fused kernel the device has, so its whole matrix is stored. A module and inputs on the meta device are counted
    without arithmetic and without memory.

    Args:
        module: Any module: a mechanism, a layer, a model.
        inputs: What it is called with. The operations of the whole batch are counted.
        options: Keyword arguments of the call.
    """
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        products, rest = FlopCounterMode(display=False), _Counter()
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), products, rest:
            module(*inputs, **options)
    finally:
        for part in training:
            part.training = True
    return Operations(
        products.get_total_flops() // 2 + rest.counts["products"],
        rest.counts["elementwise"],
        rest.counts["transcendental"],
        num_parameters(module),
        tuple(sorted(rest.unknown)),
    )


def attention_cost(attention: Spec, grid: Grid, *, dim: int, num_heads: int, key_dim: int | None = None) -> Operations:
    """Counts the operations of a mechanism on one image, all heads, without the host's projections.

    The mechanism is counted on the meta device, without arithmetic, or on the CPU if it cannot run there. To count a
    mechanism that is built already, hand it to `count_operations` with its inputs.

    Args:
        attention: A name, or a mapping with `name` and options.
        grid: Where the tokens lie; also the nominal grid of the mechanism.
        dim: Channels C over all heads.
        num_heads: Heads h.
        key_dim: Channels of q and k per head; None means C / h.

    Raises:
        UserError: If there is no such mechanism, or it refuses its options or the grid.

    Example:
        >>> from linvit import Grid
        >>> from linvit.analysis import attention_cost
        >>> attention_cost("linear", Grid((14, 14)), dim=192, num_heads=3).matmul  # 2 N C d + N C
        4854528
    """

    def count(device: str) -> Operations:
        context = {"dim": dim, "num_heads": num_heads, "grid": grid, "key_dim": key_dim}
        mechanism: Attention = attentions.create(attention, **context).to(device)
        heads, keys, width = mechanism.num_heads, mechanism.key_dim, mechanism.head_dim
        q = torch.zeros(1, heads, grid.num_queries, keys, device=device)
        k = q if mechanism.projections == "qv" else torch.zeros(1, heads, grid.num_keys, keys, device=device)
        v = torch.zeros(1, heads, grid.num_keys, width, device=device)
        x = torch.zeros(1, grid.num_queries, mechanism.dim, device=device)
        return count_operations(mechanism, q, k, v, grid, **({"x": x} if mechanism.takes_input else {}))

    try:
        return count("meta")
    except (NotImplementedError, RuntimeError):  # such as a test of a number's value
        return count("cpu")


def macs(model: nn.Module, img_size: int | Sequence[int] = 224, in_chans: int = 3) -> int:
    """Multiply-accumulates of one image's forward pass in evaluation mode, as papers on backbones state them.

    Counted are convolutions, linear layers and matrix products, the two of softmax attention included, 1 per multiplied
    pair; not norms, activations, softmax, pooling, interpolation and products entry by entry (which are all there is to
    Hydra). `count_operations` counts these, too.

    A model on the meta device is counted there, without arithmetic.

    Args:
        model: Called with images (1, in_chans, H, W).
        img_size: Side, or (H, W).
        in_chans: Image channels.
    """
    parameter = next(model.parameters())
    return count_operations(model, parameter.new_zeros(1, in_chans, *image_size(img_size))).matmul


def num_parameters(module: nn.Module) -> int:
    """Learnable parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


class _Counter(TorchDispatchMode):
    """Adds up what the rules say of every operator that is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count, known = operations_of(func, args, kwargs, out)
        self.counts.update(count._asdict())
        if not known:
            self.unknown.add(str(func.overloadpacket))
        return out
