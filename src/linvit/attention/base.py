"""The contract that every attention mechanism meets."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from linvit.attention.kernels.formula import Formula
from linvit.attention.ops.functional import SizeOf
from linvit.errors import UserError, check_choice, check_number
from linvit.registry import Spec, attentions
from linvit.signatures import parameters_of

Stem = Literal["none", "conv_silu"]
OutNorm = Literal["none", "ln"]
Gate = Literal["none", "linear", "silu"]
ProjNorm = Literal["none", "bn2d"]
Complexity = Literal["O(N)", "O(N log N)", "O(N^1.5)", "O(N^2)"]
HOST_OPTIONS = {
    "stem": get_args(Stem),
    "out_norm": get_args(OutNorm),
    "gate": get_args(Gate),
    "proj_norm": get_args(ProjNorm),
}
"""What a mechanism may ask of its host, by attribute."""


class Grid(NamedTuple):
    """Where the tokens lie in the image. Spatial size is passed down, never recovered from a token count.

    Tokens are row-major: the prefix (class and register tokens) first, then patch `row * W + column`.

    A forward pass makes another with `Grid(...)`: where torch 2.11 compiles `_replace`, the fields are lost.

    Attributes:
        size: Patch grid of the queries, (H, W).
        kv_size: Patch grid of the keys and values; None means `size`. Differs under spatial reduction.
        num_prefix: Class and register tokens before the patch tokens, in q, k and v alike.
    """

    size: tuple[int, int]
    kv_size: tuple[int, int] | None = None
    num_prefix: int = 0

    @property
    def keys_size(self) -> tuple[int, int]:
        """Patch grid of the keys and values, (H, W)."""
        return self.size if self.kv_size is None else self.kv_size

    @property
    def num_queries(self) -> int:
        """Query tokens N, prefix included."""
        return self.num_prefix + self.size[0] * self.size[1]

    @property
    def num_keys(self) -> int:
        """Key and value tokens M, prefix included."""
        height, width = self.keys_size
        return self.num_prefix + height * width

    def check(self) -> None:
        """Raises a `UserError` unless both patch grids have a patch and the prefix is not negative."""
        for name, sides in (("size", self.size), ("kv_size", self.keys_size)):
            for side in sides:
                check_number(f"the grid's {name} {tuple(sides)}: a side", side, at_least=1, whole=True)
        check_number("the grid's num_prefix", self.num_prefix, at_least=0, whole=True)

    def plane(self, x: Tensor) -> Tensor:
        """The patch tokens of (B, N, C) as a plane (B, C, H, W); a view."""
        plane: Tensor = x[:, self.num_prefix :].mT.unflatten(2, self.size)
        return plane

    def map_patches(self, change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Applies a function (B, C, H, W) -> (B, C', H', W') to the patches of tokens (B, N, C), not to the prefix."""
        changed = change(self.plane(x)).flatten(2).mT
        return torch.cat([x[:, : self.num_prefix], changed], dim=1) if self.num_prefix else changed


class Attention(nn.Module):
    """Mixes tokens that are already projected and split into heads.

    A subclass supplies `forward`; options are keyword arguments of its constructor with defaults. What a mechanism
    cannot do, it declares here, and hosts, analysis and tests read the declaration.

    Args:
        dim: Channels C of the values over all heads.
        num_heads: Heads h; `dim` must be a multiple.
        grid: The nominal grid, for parameters of fixed length. The grid of a call may differ.
        key_dim: Channels of q and k per head; None means C / h.

    Attributes:
        projections: What the host projects. "qkv"; "qv": k is q (SOFT); "kv": q is the layer's input itself (Poly-NL);
            "qk": v is (MLLA).
        takes_bias: Whether `forward` accepts `bias=` (B or 1, h, N, M), to be added to the logits.
        narrow_keys: Whether `key_dim` may differ from C / h. Not where keys and values are multiplied entry by entry.
        takes_input: Whether `forward` accepts `x=` (B, N, C), the layer's input.
        rotary: Whether the mechanism itself turns q and k, or features of them, by their positions. A host that does
            refuses it then.
        equivariant: Whether the output moves with its queries and keys are a set: no token's place in the grid counts.
            Hosts that drop tokens ask it.
        masked_key: What the entries of a key that `mask` leaves out are set to, at which it has no weight, whatever the
            others are; None where no number does that. What takes a bias needs none.
        fewer_keys: Whether keys and values may be of another grid than the queries, as under spatial reduction. Hosts
            ask it of a mechanism that projects "qkv".
        channelwise: Whether the equivalent matrix differs from channel to channel.
        linear_in_values: Whether the output is `M v + bias` with M independent of v. If not, the mechanism has its own
            `attention_matrix(q, k, v, grid)`.
        no_matrix: Why there is no such matrix at all, in words, for a mechanism whose weights depend on the values.
        state_size: Numbers per image that all keys and values come down to, where no `factors` tell it.
        matrix_is_exact: Whether that method's matrix times v is the output. Not where more is done to the values before
            or to their mixture after (a norm, a linear layer).
        max_rank: An upper bound of the matrix's rank (of each channel's, if channelwise) on any grid; None is none.
        complexity: How time and memory grow with the number of tokens: "O(N)", "O(N log N)", "O(N^1.5)" or "O(N^2)";
            None if undeclared.
        proj_norm: Norm behind the host's output projection: "none", or "bn2d" (BatchNorm of channels over all tokens).
        dim: Channels of the values over all heads, which a mechanism may widen; `input_dim` are the layer's.
        key_heads: Heads of q and k, in a number that divides h; as many as of v unless heads share them.
        out_dim: Channels of the output over all heads, whose number is `out_heads`: h, or h and some of its own.
        stem: What the host does to its input before it projects: "none", or "conv_silu", a linear layer, a depthwise
            3 x 3 convolution and SiLU (MLLA).
        out_norm: Norm of the output over all channels, before the gate: "none", or "ln" (NaLaFormer's LayerNorm).
        gate: What the host multiplies the output by, entry by entry, before its output projection: "none"; "linear", a
            linear map of its input, without the stem (RALA, PolaFormer); "silu", SiLU of that (MLLA, NaLaFormer).
        qkv_bias: Whether the host's projection to q, k and v has a bias where its option `qkv_bias` asks for one. The
            gate's does not depend on it.
        recompute: Whether methods under `@linvit.recomputed` are run once more in backward, so that training keeps q, k
            and v alone. It may be set to False at any time: a layer is then 10 to 35 % faster in training and keeps two
            to six times as much. True has no effect on a mechanism without such a method.
        attention_kernel: What computes methods under `@with_kernel`: "torch", a kernel such as "triton", or "auto"; see
            `linvit.attention.kernels`.
    """

    projections: Literal["qkv", "qv", "kv", "qk"] = "qkv"
    narrow_keys: ClassVar[bool] = True
    takes_bias: ClassVar[bool] = False
    takes_input: bool = False
    rotary: bool = False
    equivariant: bool = False
    masked_key: float | None = None
    fewer_keys: bool = True
    channelwise: bool = False
    linear_in_values: bool = True
    no_matrix: str = ""
    state_size: int | None = None
    matrix_is_exact: bool = True
    max_rank: int | None = None
    complexity: Complexity | None = None
    proj_norm: ProjNorm = "none"
    stem: Stem = "none"
    out_norm: OutNorm = "none"
    gate: Gate = "none"
    qkv_bias: bool = True
    recompute: bool = True
    attention_kernel: str = "auto"
    exports_any_size: bool = True

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
        if not self.narrow_keys and key_dim not in (None, dim // num_heads):
            raise UserError(
                f"{type(self).__name__} multiplies keys and values entry by entry, so they are of one width; got "
                f"key_dim={key_dim} for values of {dim // num_heads} channels per head. Leave key_dim out"
            )
        for name, allowed in HOST_OPTIONS.items():  # those that the class sets
            check_choice(f"{type(self).__name__}.{name}", getattr(self, name), allowed)
        self.dim = self.input_dim = dim
        self.num_heads = self.key_heads = self.out_heads = num_heads
        self.grid = grid
        self.head_dim = dim // num_heads
        self.key_dim = self.head_dim if key_dim is None else key_dim
        self.out_dim = dim

    def set_key_dim(self, width: int, *, option: str, key_dim: int | None) -> None:
        """Sets the width of q and k per head by another option than `key_dim`, in a constructor.

        `option` is that option with its value, for messages, such as "key_ratio=0.5". A `UserError` says that `key_dim`
        was given, too, or that no channel is left.
        """
        if key_dim is not None:
            raise UserError(f"key_dim={key_dim} and {option} both set the width of the keys; leave one of them out")
        if width < 1:
            raise UserError(f"{option} leaves no channel of the keys, which have {self.head_dim} per head without it")
        self.key_dim = width

    def __setattr__(self, name: str, value: Any) -> None:
        if name in HOST_OPTIONS:  # a module of such a name, too, would never be found
            check_choice(name, value, HOST_OPTIONS[name])
        super().__setattr__(name, value)

    @property
    def masks_keys(self) -> bool:
        """Whether a call may leave out keys by `mask`; set by a class whose `forward` has such a `mask` itself."""
        return self.takes_bias or self.masked_key is not None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, *, mask: Tensor | None = None, **extra: Any
    ) -> Tensor:
        """Runs `forward` after a check of the numbers of tokens.

        Args:
            q: Queries (B, h, N, dk), or of fewer heads (`key_heads`).
            k: Keys (B, h, M, dk), as the queries.
            v: Values (B, h, M, d).
            grid: Where the tokens lie.
            mask: Which keys and values take part, (B, M) of bool, as in a batch of images of several sizes; at least
                one of each image. None is all. A `forward` that has a `mask` itself gets it as it is.
            extra: What else `forward` takes.

        Raises:
            UserError: If the tokens are not those of the grid, keys are fewer than queries and may not be, or some are
                masked and cannot be.
        """
        tokens = q.shape[2], k.shape[2], v.shape[2]
        queries = grid.num_prefix + grid.size[0] * grid.size[1]
        keys = queries if grid.kv_size is None else grid.num_keys
        if tokens != (queries, keys, keys):
            raise UserError(
                f"got {tokens[0]} queries, {tokens[1]} keys and {tokens[2]} values for {grid}, which has "
                f"{queries} and {keys}; pass the Grid that the tokens were made with"
            )
        if not self.fewer_keys and grid.keys_size != grid.size:
            (rows, columns), (key_rows, key_columns) = grid.size, grid.keys_size
            raise UserError(
                f"{type(self).__name__} needs as many keys as queries (fewer_keys is False); got a grid of "
                f"{rows}x{columns} queries and {key_rows}x{key_columns} keys. Use sr_ratio=1 and sr_pool=0 with it"
            )
        if mask is not None and "mask" in parameters_of(type(self).forward):
            extra["mask"] = mask
        elif mask is not None:
            if not self.masks_keys:
                raise UserError(
                    f"{type(self).__name__} cannot leave keys out (masked_key is None, and takes_bias False): pass the "
                    f"tokens of each image alone, without a mask"
                )
            left_out = ~mask[:, None, :, None]  # (B, 1, M, 1)
            v = v.masked_fill(left_out, 0)
            if self.takes_bias:
                extra["bias"] = extra.get("bias", 0) + q.new_zeros(()).masked_fill(left_out.mT, -math.inf)
            else:
                k = k.masked_fill(left_out, cast("float", self.masked_key))
        return super().__call__(q, k, v, grid, **extra)  # type: ignore[no-any-return]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h', N, out_dim / h'), h' = `out_heads`."""
        raise NotImplementedError(f"{type(self).__name__} has no forward(self, q, k, v, grid)")

    def tie(self, earlier: Sequence["Attention"]) -> None:
        """Shares parameters with other layers, for a mechanism that does. A backbone calls it once, when it is built.

        Args:
            earlier: The mechanisms before this one, from the first on, of any class and grid.
        """

    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        """The mechanism's entries of a checkpoint, brought from the grid of the checkpoint to the nominal grid.

        A mechanism with a parameter or buffer whose shape depends on the grid overrides it, so that its weights can be
        loaded at another image size. What is resized must compute what the parameters would compute themselves on
        that grid. The default changes nothing.

        Args:
            state: A new dict of the entries that the checkpoint has, under the mechanism's own names. Their shapes are
                not checked.
            size_of: The patch grid (H, W) that so many patches have in the checkpoint, or None if they have none. The
                checkpoint's images are square unless it says otherwise.

        Returns:
            The entries. One that cannot be resized stays as it is, and is reported as not fitting.

        Example:
            >>> def resize_tables(self, state, size_of):
            ...     if "table" in state:  # (1, patches, C)
            ...         state["table"] = resize_table(state["table"], self.table, self.grid.size, size_of)
            ...     return state
        """
        return state

    def rank_bound(self, grid: Grid) -> int:
        """An upper bound of the rank of the equivalent matrix: the tokens, or `max_rank` if that is smaller."""
        tokens = min(grid.num_queries, grid.num_keys)
        return tokens if self.max_rank is None else min(tokens, self.max_rank)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        """Thin factors with equivalent matrix `left @ right.mT`, or None if there are none.

        (B, h, N, r) and (B, h, M, r), or (B, h, d, N, r) and (B, h, d, M, r) if the mechanism is `channelwise`. With
        factors the rank at thousands of tokens is a matter of milliseconds.
        """
        return None

    def formula(self, q: Tensor, k: Tensor, grid: Grid) -> Formula | None:
        """What the method under `@with_kernel` computes, for `linvit.attention.kernels`; None if it has no kernel."""
        return None

    def channel_matrix(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor | None:
        """The matrix A (B, h, d, d) of a mechanism that mixes channels and not tokens, `o = v A^T`; None for others.

        Such a mechanism declares `linear_in_values = False` and has no `attention_matrix`.
        """
        return None

    def matrix_parts(self) -> dict[str, "Attention"]:
        """Mechanisms whose equivalent matrices add up to this one's, by name; {} if it is all of one piece.

        For a kernel beside a convolution of the values `linvit.attention.ops.value_conv` makes them. They may share
        parameters with this mechanism; nothing trains through them.
        """
        return {}

    def extra_repr(self) -> str:
        """Shows the constructor's sizes in `print(model)`."""
        return f"dim={self.dim}, num_heads={self.num_heads}, grid={tuple(self.grid)}"


def create_attention(spec: Spec, *, dim: int, num_heads: int, grid: Grid, **options: Any) -> Attention:
    """Builds the attention that a spec describes.

    Args:
        spec: A name, or a mapping with `name` and options of the mechanism.
        dim: Channels of the values over all heads.
        num_heads: Heads, which must divide `dim`.
        grid: Where the tokens lie; of the queries, and of keys and values if they have another.
        options: Further options of the mechanism, such as `key_dim`.

    Raises:
        UserError: If there is no such name, or it does not take an option.

    Example:
        >>> linvit.create_attention("linear", dim=192, num_heads=3, grid=Grid((14, 14)))
    """
    return cast("Attention", attentions.create(spec, dim=dim, num_heads=num_heads, grid=grid, **options))
