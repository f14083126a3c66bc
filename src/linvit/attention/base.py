"""Base class of all attention mechanisms."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from linvit.attention.declarations import BEFORE, Facts, Host, Precision, declared, declared_before
from linvit.attention.grid import Grid as Grid
from linvit.attention.kernels.choice import kernel_output
from linvit.attention.kernels.formula import Formula
from linvit.attention.ops.decorators import PRECISIONS, in_backward_again
from linvit.attention.ops.functional import SizeOf
from linvit.attention.packed import Packed as Packed
from linvit.errors import UserError, check_choice, check_number
from linvit.registry import Spec, attentions
from linvit.registry.signatures import parameters_of


class Attention(nn.Module):
    """Mixes tokens that are already projected and split into heads.

    A subclass supplies the formula, `core(q, k, v, grid)`; options are keyword arguments of its constructor with
    defaults. `forward` calls it, and is overridden to add operations outside, such as a convolution. A small subclass
    may override only `forward`, which then runs as it is written.

    Args:
        dim: Channels C of the values over all heads.
        num_heads: Heads h; `dim` must be a multiple.
        grid: The nominal grid, for parameters of fixed length. The grid of a call may differ.
        key_dim: Channels of q and k per head; None means C / h.

    Attributes:
        host: Tasks of the layer around the mechanism.
        facts: Properties that hosts, analysis and `linvit check` rely on.
        precision: Precision of `core`. "float32": at least float32 with autocast off (`linvit.full_precision`);
            "mixed": the same, but on a GPU bfloat16 stays bfloat16 (`mixed_precision`); "inherit": that of its inputs.
        recompute: True if `core` runs again in the backward pass, so that training stores only its inputs
            (`linvit.recomputed`). False where it draws random numbers or stores little else. It may be set to False at
            any time: a layer is then 10 to 35 % faster in training and stores two to six times as much.
        attention_kernel: Implementation of a `core` that has a `formula`: "torch", a kernel such as "triton", or
            "auto"; see `linvit.attention.kernels`.
        dim: Channels of the values over all heads, which a mechanism may widen; `input_dim` is the layer's number.
        key_heads: Number of heads of q and k, a divisor of h; equal to that of v unless heads share them.
        out_dim: Channels of the output over all heads. Their number is `out_heads`: h, or more.
    """

    host: Host = Host()
    facts: Facts = Facts()
    precision: ClassVar[Precision] = "float32"
    recompute: bool = True
    attention_kernel: str = "auto"

    def __init_subclass__(cls, **options: Any) -> None:
        """Makes `core` run as declared."""
        super().__init_subclass__(**options)
        check_choice("precision", cls.precision, PRECISIONS)
        own = {} if "facts" in vars(cls) else {"packs": False}  # what a subclass changes may mix tokens
        cls.host, cls.facts = declared(cls.host, cls.facts, declared_before(cls.__name__, vars(cls)) | own)
        if "core" in vars(cls):
            cls.core = as_declared(vars(cls)["core"])  # type: ignore[method-assign]

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__()
        check_number("dim", dim, at_least=1, whole=True)
        check_number("num_heads", num_heads, at_least=1, whole=True)
        if key_dim is not None:
            check_number("key_dim", key_dim, at_least=1, whole=True)
        grid.check()
        if dim % num_heads:
            raise UserError(
                f"dim {dim} is not divisible by num_heads {num_heads}; "
                f"{dim} can be split into {', '.join(str(h) for h in range(1, dim + 1) if dim % h == 0)} heads"
            )
        if self.facts.same_width and key_dim not in (None, dim // num_heads):
            raise UserError(
                f"{type(self).__name__} multiplies keys and values entry by entry, so they are of one width; got "
                f"key_dim={key_dim} for values of {dim // num_heads} channels per head. Leave key_dim out"
            )
        self.dim = self.input_dim = dim
        self.num_heads = self.key_heads = self.out_heads = num_heads
        self.grid = grid
        self.head_dim = dim // num_heads
        self.key_dim = self.head_dim if key_dim is None else key_dim
        self.out_dim = dim

    def set_key_dim(self, width: int, *, option: str, key_dim: int | None) -> None:
        """Sets the width of q and k per head by another option than `key_dim`, in a constructor.

        `option` is that option with its value, for messages, such as "key_ratio=0.5". Raises a `UserError` if `key_dim`
        is also given, or if no channel is left.
        """
        if key_dim is not None:
            raise UserError(f"key_dim={key_dim} and {option} both set the width of the keys; leave one of them out")
        if width < 1:
            raise UserError(f"{option} leaves no channel of the keys, which have {self.head_dim} per head without it")
        self.key_dim = width

    def declare(self, **fields: Any) -> None:
        """Sets fields of `host` and `facts` that depend on the options, in a constructor."""
        self.host, self.facts = declared(self.host, self.facts, fields)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in BEFORE and (new := declared_before(type(self).__name__, {name: value})):
            self.declare(**new)
        super().__setattr__(name, value)

    @property
    def takes_mask(self) -> bool:
        """True if a call may exclude keys by `mask`."""
        return self.host.accepts_bias or self.facts.mask_value is not None or self.takes("mask")

    def takes(self, argument: str) -> bool:
        """Returns True if `forward`, or `core` where `forward` is not overridden, has an argument of this name."""
        own = type(self)
        return argument in parameters_of(own.core if own.forward is Attention.forward else own.forward)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, grid: Grid | Packed, *, mask: Tensor | None = None, **extra: Any
    ) -> Tensor:
        """Runs `forward` after checking the numbers of tokens.

        With `Packed` in place of a `Grid`, q, k and v are rows (1, h, T, d) of images of several sizes. The output is
        that of each image alone: `forward` gets the rows if the mechanism declares `packs`, or else group by group.

        Args:
            q: Queries (B, h, N, dk), or of fewer heads (`key_heads`).
            k: Keys (B, h, M, dk), as the queries.
            v: Values (B, h, M, d).
            grid: Positions of the tokens.
            mask: True for the keys and values that take part, (B, M), for example in a batch of images of several
                sizes; at least one of each image. None means all. A mechanism with an argument `mask` receives it.
            extra: Further arguments of `forward`.

        Raises:
            UserError: If the numbers of tokens differ from the grid's, if the keys have another grid than the
                queries under `same_grid`, or if the mechanism cannot mask keys.
        """
        tokens = q.shape[2], k.shape[2], v.shape[2]
        if isinstance(grid, Packed):
            return self._packed(q, k, v, grid, mask, extra)
        queries = grid.num_prefix + grid.size[0] * grid.size[1]
        keys = queries if grid.kv_size is None else grid.num_keys
        if tokens != (queries, keys, keys):
            raise UserError(
                f"got {tokens[0]} queries, {tokens[1]} keys and {tokens[2]} values for {grid}, which has "
                f"{queries} and {keys}; pass the Grid that the tokens were made with"
            )
        if self.facts.same_grid and grid.keys_size != grid.size:
            (rows, columns), (key_rows, key_columns) = grid.size, grid.keys_size
            raise UserError(
                f"{type(self).__name__} needs as many keys as queries (same_grid); got a grid of "
                f"{rows}x{columns} queries and {key_rows}x{key_columns} keys. Use sr_ratio=1 and sr_pool=0 with it"
            )
        if mask is not None and self.takes("mask"):
            extra["mask"] = mask
        elif mask is not None:
            if not self.takes_mask:
                raise UserError(
                    f"{type(self).__name__} cannot leave keys out (mask_value is None, and accepts_bias False): pass "
                    f"the tokens of each image alone, without a mask"
                )
            left_out = ~mask[:, None, :, None]  # (B, 1, M, 1)
            v = v.masked_fill(left_out, 0)
            if self.host.accepts_bias:
                extra["bias"] = extra.get("bias", 0) + q.new_zeros(()).masked_fill(left_out.mT, -math.inf)
            else:
                k = k.masked_fill(left_out, cast("float", self.facts.mask_value))
        return super().__call__(q, k, v, grid, **extra)  # type: ignore[no-any-return]

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, grid: Packed, mask: Tensor | None, extra: dict[str, Any]
    ) -> Tensor:
        """Runs `forward` on rows of packed images, or on each group of images of one size."""
        name = type(self).__name__
        if {(len(x), x.shape[2]) for x in (q, k, v)} != {(1, grid.num_queries)}:
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise UserError(f"got q, k and v of {shapes} for {grid}; they must be rows (1, h, {grid.num_queries}, d)")
        if mask is not None or "bias" in extra:
            raise UserError(f"{name} takes no mask and no bias of packed images: call it with the tokens of each image")
        call = super().__call__
        if self.facts.packs:
            return call(q, k, v, grid, **extra)  # type: ignore[no-any-return]
        if not torch.compiler.is_compiling():
            _say_one_by_one(name)

        def forward(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
            *values, own = more
            return call(q, k, v, own, **dict(zip(extra, values, strict=True)))  # type: ignore[no-any-return]

        return grid.map_images(forward, q, k, v, *extra.values())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, *more: Any, **extra: Any) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h', N, out_dim / h'), h' = `out_heads`."""
        return self.core(q, k, v, grid, *more, **extra)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, *more: Any, **extra: Any) -> Tensor:
        """Computes the formula, with the shapes of `forward`; runs in `precision`, recomputed, or as a kernel."""
        raise NotImplementedError(f"{type(self).__name__} has no core(self, q, k, v, grid)")

    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        """Returns the mechanism's entries of a checkpoint, resized from the checkpoint's grid to the nominal grid.

        A mechanism with a parameter or buffer whose shape depends on the grid overrides it, so that its weights can be
        loaded at another image size. Resized entries must compute the same as the parameters would on
        that grid. The default changes nothing.

        Args:
            state: A new dict of the entries that the checkpoint has, under the mechanism's own names. Their shapes are
                not checked.
            size_of: Returns the patch grid (H, W) of a number of patches in the checkpoint, or None if unknown. The
                checkpoint's images are square unless it specifies another size.

        Returns:
            The entries. An entry that cannot be resized is returned unchanged, and is reported as not fitting.

        Example:
            >>> def resize_tables(self, state, size_of):
            ...     if "table" in state:  # (1, patches, C)
            ...         state["table"] = resize_table(state["table"], self.table, self.grid.size, size_of)
            ...     return state
        """
        return state

    def rank_bound(self, grid: Grid) -> int:
        """Returns an upper bound of the rank of the equivalent matrix: the tokens, or `max_rank` if that is smaller."""
        tokens = min(grid.num_queries, grid.num_keys)
        return tokens if self.facts.max_rank is None else min(tokens, self.facts.max_rank)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        """Returns thin factors with equivalent matrix `left @ right.mT`, or None if there are none.

        (B, h, N, r) and (B, h, M, r), or (B, h, d, N, r) and (B, h, d, M, r) if the mechanism is `channelwise`. With
        factors, the rank at thousands of tokens takes milliseconds.
        """
        return None

    def formula(self, q: Tensor, k: Tensor, grid: Grid) -> Formula | None:
        """Describes `core` for `linvit.attention.kernels`; None if no kernel computes it with these options.

        Of packed images, q and k are rows and `grid` is their `Packed`, if the mechanism declares `packs`.
        """
        return None

    def channel_matrix(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor | None:
        """Returns the matrix A (B, h, d, d), `o = v A^T`, of a mechanism that mixes channels, not tokens; else None.

        Such a mechanism declares `linear_in_values=False` and has no `attention_matrix`.
        """
        return None

    def matrix_parts(self) -> dict[str, "Attention"]:
        """Returns mechanisms whose equivalent matrices add up to this one's, by name; {} without such parts.

        For a kernel beside a convolution of the values, `linvit.attention.ops.value_conv` creates them. They may share
        parameters with this mechanism; they are not trained.
        """
        return {}

    def extra_repr(self) -> str:
        """Shows the constructor's sizes in `print(model)`."""
        return f"dim={self.dim}, num_heads={self.num_heads}, grid={tuple(self.grid)}"


@functools.cache
def _say_one_by_one(name: str) -> None:
    """Warns once of a mechanism that has no packed form."""
    warnings.warn(
        f"{name} does not declare packs, so packed images of different sizes are attended one size after the other: "
        f"the results are the same, with more calls",
        stacklevel=4,
    )


def as_declared(core: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes a `core` run as a kernel, or in the declared `precision` and again in the backward pass with `recompute`.

    Kernels compute `core` of q, k, v and the grid only, so calls with further arguments use torch's operators.
    """
    cores = {name: in_precision(core) for name, in_precision in PRECISIONS.items()}

    @functools.wraps(core)
    def run(self: Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid, *more: Any, **extra: Any) -> Tensor:
        if (v.is_cuda or self.attention_kernel != "auto") and not (more or extra):
            out = kernel_output(self, q, k, v, grid)
            if out is not None:
                return out
        chosen = cores[self.precision]
        if self.recompute and torch.is_grad_enabled():
            return in_backward_again(chosen, self, q, k, v, grid, *more, **extra)
        return chosen(self, q, k, v, grid, *more, **extra)

    return run


def create_attention(spec: Spec, *, dim: int, num_heads: int, grid: Grid, **options: Any) -> Attention:
    """Builds the attention of a spec.

    Args:
        spec: A name, or a mapping with `name` and options of the mechanism.
        dim: Channels of the values over all heads.
        num_heads: Heads, which must divide `dim`.
        grid: Positions of the tokens: of the queries, and of keys and values if theirs differ.
        options: Further options of the mechanism, such as `key_dim`.

    Raises:
        UserError: If the name does not exist, or the mechanism does not accept an option.

    Example:
        >>> linvit.create_attention("linear", dim=192, num_heads=3, grid=Grid((14, 14)))
    """
    return cast("Attention", attentions.create(spec, dim=dim, num_heads=num_heads, grid=grid, **options))
