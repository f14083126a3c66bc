"""Base class of layers that replace attention in timm models, and hooks that record the grid of their tokens."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from timm.layers import apply_rot_embed_cat, gen_relative_position_index, resize_rel_pos_bias_table
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn

from linvit.attention.base import Attention, Grid
from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.layers.hosting import AttentionHost, attend, queries_keys_values
from linvit.layers.projections import Rows, joined, widened
from linvit.registry import Spec, attentions

ACCEPTED = "use one of timm's models that docs/guides/timm.md lists, such as vit_tiny_patch16_224"
"""Ends the messages about models whose attention cannot be replaced."""


class PatchGrid:
    """Records the patch grid of a model's images, as a forward pre-hook of its patch embedding."""

    def __init__(self, patch_embed: Any, size: tuple[int, int], num_prefix: int) -> None:
        self.grid = Grid(size, num_prefix=num_prefix)
        patch_embed.register_forward_pre_hook(self)

    def __call__(self, patch_embed: Any, args: tuple[Tensor, ...]) -> None:
        """Records the grid of images (B, C, H, W) before they are embedded."""
        height, width = patch_embed.dynamic_feat_size(args[0].shape[-2:])
        self.grid = Grid((height, width), num_prefix=self.grid.num_prefix)


class NaFlexGrid(PatchGrid):
    """Grid of images of one size, or of a batch of several sizes (timm's NaFlexVit), as patches with their positions.

    The grid of such a batch is one row with as many patches as the longest image has.
    """

    places: Tensor
    _sizes: Sequence[tuple[int, int]] | None = ()

    def __init__(self, network: Any, img_size: tuple[int, int]) -> None:
        network.use_key_only_attn_mask = True  # of N entries, not N x N
        self.grid = Grid(tuple(network.embeds.dynamic_feat_size(img_size)), num_prefix=network.num_prefix_tokens)
        network.embeds.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, patch_embed: Any, args: tuple[Tensor, ...], given: Any) -> None:  # type: ignore[override]
        """Records the grid of images (B, C, H, W), or of patches (B, N, C) whose positions are given."""
        if given["patch_coord"] is None:
            super().__call__(patch_embed, args)
        else:
            self.places, self._sizes = given["patch_coord"], None  # row and column of each patch, (B, N, 2)
            self.grid = Grid((1, self.places.shape[1]), num_prefix=self.grid.num_prefix)

    @property
    def sizes(self) -> Sequence[tuple[int, int]]:
        """Numbers of patches of each image, (H, W)."""
        if self._sizes is None:  # once per batch, since it synchronises with a GPU
            self._sizes = [(row + 1, column + 1) for row, column in self.places.amax(1).tolist()]
        return self._sizes


class MapGrid(PatchGrid):
    """Records the grid of a map (B, C, H, W), as a forward hook of the module that makes it."""

    def __init__(self, source: nn.Module, grid: Grid) -> None:
        self.grid = grid
        source.register_forward_hook(self)

    def __call__(self, source: nn.Module, args: Any, output: Any) -> None:  # type: ignore[override]
        """Records the grid of the map, or of the first of several outputs."""
        height, width = (output if isinstance(output, Tensor) else output[0]).shape[-2:]
        self.grid = Grid((height, width), num_prefix=self.grid.num_prefix)


class Model:
    """Model of timm whose attention is being replaced, and the size of its images."""

    def __init__(self, network: Any, img_size: int | Sequence[int]) -> None:
        self.network = network
        self.img_size = image_size(img_size)
        self._maps: dict[nn.Module, MapGrid] = {}

    @cached_property
    def patches(self) -> PatchGrid:
        """Patch grid of the model's images, shared by all layers."""
        if isinstance(self.network, NaFlexVit):
            return NaFlexGrid(self.network, self.img_size)
        embed: Any = getattr(self.network, "patch_embed", None)
        if not hasattr(embed, "dynamic_feat_size"):
            raise UserError(
                f"{type(self.network).__name__} has no patch embedding that tells the grid of its tokens; {ACCEPTED}"
            )
        size = getattr(embed, "grid_size", None) or embed.dynamic_feat_size(self.img_size)
        return PatchGrid(embed, tuple(size), getattr(self.network, "num_prefix_tokens", 0))

    def map_from(self, source: nn.Module, nominal: Grid) -> MapGrid:
        """Returns the grid of the maps that a module outputs, shared by all layers after it."""
        if source not in self._maps:
            self._maps[source] = MapGrid(source, nominal)
        return self._maps[source]

    def parent(self, name: str) -> Any:
        """Returns the module that has a module as an attribute."""
        return self.network.get_submodule(name.rpartition(".")[0])

    def level(self, name: str) -> tuple[int, int]:
        """Returns the plane (H, W) of the level of the pyramid that contains a module."""
        strides = {f"{level['module']}.": level["reduction"] for level in self.network.feature_info}
        stride = next(strides[module] for module in strides if name.startswith(module.replace("block.", "blocks.")))
        height, width = self.img_size
        return -(-height // stride), -(-width // stride)


class ReplacedAttention(AttentionHost):
    """Mechanism between the projections of one of timm's attention modules, (B, N, C) -> (B, N, C).

    It keeps the rows of the q, k, v projections that the mechanism uses, the norms of q and k, and the output
    projection. If a mechanism widens its output, further columns of the projection get initial values. A relative
    position bias is kept for a mechanism that accepts one. Stem, norm and gate are new if the mechanism declares them;
    the gate is initially 1.

    A subclass names the classes that it replaces, has a constructor `(source, spec, model, name)`, with the module, its
    `Model` and its path there, and has the module's `forward`. It is listed in the table in `attention.py`.
    """

    sources: ClassVar[tuple[type[nn.Module], ...]]
    kept: ClassVar[set[str]] = {"qkv", "q_proj", "k_proj", "v_proj", "q_bias", "v_bias", "q_norm", "k_norm", "proj"}
    """Parameters of the source that are kept; a source with other parameters is an error."""
    per_head: bool = False
    """True if the rows of `qkv` are q, k and v head by head, instead of all of q, then k, then v."""

    def __init__(self, source: Any, spec: Spec, grid: Grid) -> None:
        super().__init__()
        proj, heads, rows = as_linear(source.proj), heads_of(source), projection_rows(source, self.per_head)
        inner, dim, key_dim = proj.in_features, rows["q"][0].shape[1], len(rows["q"][0]) // heads
        narrow = {} if key_dim == inner // heads else {"key_dim": key_dim}
        self.mechanism: Attention = attentions.create(spec, dim=inner, num_heads=heads, grid=grid, **narrow)
        batch_norm = self.mechanism.host.norm == "bn2d"
        if (self.mechanism.num_heads, self.mechanism.dim, batch_norm) != (heads, inner, False):
            raise UserError(
                f"a timm model keeps its {heads} heads of {inner // heads} channels and its output projection without "
                f"a norm; {spec} asks for {self.mechanism.num_heads} heads of {self.mechanism.head_dim} channels and "
                f"norm '{self.mechanism.host.norm}'. Leave these options out, or use one of linvit's backbones"
            )
        if (self.mechanism.key_dim, self.mechanism.key_heads) != (key_dim, heads):
            raise UserError(
                f"the keys of a timm model have {key_dim} channels in each of {heads} heads, and its projections are "
                f"kept; {type(self.mechanism).__name__} needs {self.mechanism.key_dim} in {self.mechanism.key_heads}. "
                f"Leave out what sets their width"
            )
        if dim != inner and (self.mechanism.host.input or self.mechanism.host.project in ("kv", "qk")):
            raise UserError(
                f"{type(source).__name__} has heads of {inner} channels for tokens of {dim}, and must have as many for "
                f"{type(self.mechanism).__name__}, which does not project tokens. Use another attention for it"
            )
        fused = grid.kv_size is None or hasattr(source, "qkv")
        self.surround([self.mechanism], dim, reduced=not fused)
        if fused:
            self.qkv = joined(rows, self.projections)
            if self.per_head:  # as in the model's own weights
                rows_of = torch.arange(sum(self.widths)).split(self.widths)
                order = torch.cat([part.unflatten(0, (heads, -1)) for part in rows_of], 1).flatten()
                for parameter in self.qkv.parameters():
                    parameter.data = parameter.data[order]
        else:
            self.q, self.kv = joined(rows, "q"), joined(rows, "kv")
        if self.gate is not None:
            self.gate.init_open()
        for part in (self.mechanism, self.stem, self.out_norm, self.gate):
            if part is not None:
                part.to(proj.weight)
        norms = {"q": getattr(source, "q_norm", None), "k": getattr(source, "k_norm", None)}
        self.q_norm, self.k_norm = (
            norm if norm is not None and letter in self.projections else nn.Identity() for letter, norm in norms.items()
        )
        table = getattr(source, "relative_position_bias_table", None)
        self.relative_position_bias_table = table if self.mechanism.host.accepts_bias else None
        if self.relative_position_bias_table is not None:
            self.register_buffer("relative_position_index", source.relative_position_index, persistent=False)
        self.window_size: Any = getattr(source, "window_size", None)
        self.rotate_half: bool = getattr(source, "rotate_half", False)
        self.proj = widened(proj, self.mechanism.out_dim, heads, self.mechanism.out_heads)
        self.proj_drop = getattr(source, "proj_drop", nn.Identity())

    def mix(self, x: Tensor, grid: Grid, **given: Any) -> Tensor:
        """Projects tokens (B, N, C) and attends; `given` are arguments `bias`, `rope` and `mask` of `attended`."""
        return self.project(self.mixed(x, grid, **given), x)

    def mixed(self, x: Tensor, grid: Grid, **given: Any) -> Tensor:
        """Does the same as `mix` without the output projection, (B, N, C) -> (B, N, out_dim)."""
        t = self.stemmed(x, grid)
        return self.attended(t, *queries_keys_values(self.mechanism, self.projected(t), t), grid, **given)

    def projected(self, t: Tensor) -> Sequence[Tensor]:
        """Projects tokens (B, N, C) to those of q, k and v that the mechanism uses, (B, N, width) each."""
        if not self.per_head:
            return self.qkv(t).split(self.widths, -1)  # type: ignore[no-any-return]
        heads = self.mechanism.num_heads
        parts = self.qkv(t).unflatten(2, (heads, -1)).split([width // heads for width in self.widths], -1)
        return [part.flatten(2) for part in parts]

    def stemmed(self, x: Tensor, grid: Grid) -> Tensor:
        """Applies the stem, if the mechanism has one, to the tokens (B, N, C) of a grid."""
        if x.shape[1] != grid.num_queries:
            raise UserError(
                f"got {x.shape[1]} tokens, but the last images that this model embedded have {grid.size[0]}x"
                f"{grid.size[1]} patches and {grid.num_prefix} prefix tokens. With checkpointing, run backward before "
                f"images of another size go forward; without, let no layer drop or add tokens"
            )
        return x if self.stem is None else self.stem(x, grid)

    def attended(
        self,
        t: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Grid,
        bias: Tensor | None = None,
        rope: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Norms and rotates q and k, (B, N, C), and attends, (B, N, out_dim).

        `bias` (B or 1, h, N, N) is used only by a mechanism that accepts one. `rope` are timm's sines and cosines
        (..., N, 2 d) of the patches, which rotate q and k; `mask` (B, N) selects the tokens that take part.
        """
        tied = k is q
        q = self._turned(self.norm_queries(q), grid.num_prefix, rope)
        k = q if tied else self._turned(self.norm_keys(k), grid.num_prefix, rope)
        if not self.mechanism.host.accepts_bias:
            bias = None
        elif (own := self.position_bias(q, grid)) is not None:
            bias = own if bias is None else own + bias
        return attend(self.mechanism, q, k, v, grid, x=t, bias=bias, mask=mask)

    def position_bias(self, q: Tensor, grid: Grid) -> Tensor | None:
        """Returns the layer's position bias (B or 1, h, N, M) for queries (B, N, C), if any."""
        table = self.relative_position_bias_table
        if table is None:
            return None
        index = self.relative_position_index
        return table[index.flatten()].unflatten(0, index.shape).permute(2, 0, 1)[None]  # type: ignore[no-any-return]

    def refuse_stem(self, models: str) -> None:
        """Raises a `UserError` if the mechanism needs a stem, for layers whose input is windows of the map."""
        if self.stem is not None:
            raise UserError(
                f"timm's {models} passes windows to its attention, so the stem "
                f"'{self.mechanism.host.stem}' of {type(self.mechanism).__name__}, a convolution of the map, has no "
                f"place. "
                f"Set stem: none, or use linvit's swin_tiny"
            )

    @property
    def looks_at_places(self) -> bool:
        """True if outputs depend on the positions of the tokens."""
        return not (self.mechanism.facts.equivariant and self.stem is None)

    def refuse_second_rotation(self, what: str) -> None:
        """Raises a `UserError` for a mechanism that cannot use queries and keys rotated by the model."""
        if self.mechanism.facts.rotary:
            raise UserError(
                f"{what} rotates q and k by its rotary positions, and {type(self.mechanism).__name__} would do it "
                f"again. Set its option rotary to false (none in mlla)"
            )
        if "q" not in self.projections:
            raise UserError(
                f"{what} rotates queries by its rotary positions, and {type(self.mechanism).__name__} projects none"
            )

    def norm_queries(self, q: Tensor) -> Tensor:
        """Norms the channels of each head of the queries, (B, N, C) -> (B, N, C), if the model does."""
        return self._normalised(self.q_norm, q)

    def norm_keys(self, k: Tensor) -> Tensor:
        """Does the same as `norm_queries` for the keys."""
        return self._normalised(self.k_norm, k)

    def _normalised(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Applies a norm over the channels of each head, (B, N, C) -> (B, N, C)."""
        if isinstance(norm, nn.Identity):
            return x
        return norm(x.unflatten(2, (self.mechanism.num_heads, -1))).flatten(2)  # type: ignore[no-any-return]

    def _turned(self, x: Tensor, prefix: int, rope: Tensor | None) -> Tensor:
        """Rotates the channels of each head of the patches, (B, N, C) -> (B, N, C)."""
        if rope is None:
            return x
        patches = x[:, prefix:].unflatten(2, (self.mechanism.num_heads, -1)).transpose(1, 2)  # (B, h, N, d)
        turned = apply_rot_embed_cat(patches, rope, half=self.rotate_half).transpose(1, 2).flatten(2)
        return torch.cat([x[:, :prefix], turned], dim=1)

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Sets another window size, like timm's method of this name, and resizes the table of relative positions."""
        old, table = self.window_size, self.relative_position_bias_table
        if old is None or tuple(window_size) == tuple(old):
            return
        self.window_size = tuple(window_size)
        if table is None:
            return
        height, width = window_size
        special = len(table) - (2 * old[0] - 1) * (2 * old[1] - 1)  # rows for the class token: 3 or none
        shape = ((2 * height - 1) * (2 * width - 1) + special, table.shape[1])
        resized = resize_rel_pos_bias_table(
            table.detach(), new_window_size=(height, width), new_bias_shape=shape, old_window_size=tuple(old)
        )
        self.relative_position_bias_table = nn.Parameter(resized, requires_grad=table.requires_grad)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Creates the table's index again, like timm's method of this name; called by transformers."""
        table = self.relative_position_bias_table
        if table is not None:
            height, width = self.window_size
            special = len(table) > (2 * height - 1) * (2 * width - 1)  # rows for the class token
            index = gen_relative_position_index((height, width), class_token=special)
            self.relative_position_index = index.to(table.device)


def as_linear(layer: Any) -> nn.Linear:
    """Returns a linear layer, or one that shares the values of a 1 x 1 convolution."""
    if isinstance(layer, nn.Linear):
        return layer
    linear = nn.Linear(layer.in_channels, layer.out_channels, bias=layer.bias is not None)
    linear.weight, linear.bias = nn.Parameter(layer.weight.detach().flatten(1)), layer.bias
    return linear


def heads_of(source: Any) -> int:
    """Returns the number of heads of a module of timm."""
    heads: int = source.heads if hasattr(source, "heads") else source.num_heads
    return heads


def projection_rows(source: Any, per_head: bool = False) -> Rows:
    """Returns weight and bias of the q, k and v projections of timm's module; a single missing bias is 0."""
    fused = getattr(source, "qkv", None)
    if fused is not None:
        weight, bias = fused.weight.flatten(1), fused.bias
        if getattr(source, "q_bias", None) is not None:  # BEiT, Swin V2: keys have no bias
            bias = torch.cat([source.q_bias, torch.zeros_like(source.q_bias), source.v_bias])
        heads = heads_of(source) if per_head else 1

        def parts(rows: Tensor) -> list[Tensor]:
            by_head = rows.unflatten(0, (heads, -1))
            total = by_head.shape[1]
            width = getattr(source, "key_dim", total // 3)
            return [part.flatten(0, 1) for part in by_head.split([width, width, total - 2 * width], 1)]

        biases: Sequence[Tensor | None] = (None, None, None) if bias is None else parts(bias)
        return dict(zip("qkv", zip(parts(weight), biases, strict=True), strict=True))
    if hasattr(source, "kv"):
        biases = (None, None) if source.kv.bias is None else source.kv.bias.chunk(2)
        pairs = [(source.q.weight, source.q.bias), *zip(source.kv.weight.chunk(2), biases, strict=True)]
        return dict(zip("qkv", pairs, strict=True))
    layers = [getattr(source, f"{letter}_proj", None) or getattr(source, letter) for letter in "qkv"]
    none = all(layer.bias is None for layer in layers)
    found = {}
    for letter, layer in zip("qkv", layers, strict=True):
        weight, bias = layer.weight, layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
        copies = source.proj.in_features // len(weight)  # more than 1 where heads share keys and values
        weight, bias = (rows.unflatten(0, (-1, source.head_dim)) for rows in (weight, bias))
        weight, bias = (rows.repeat_interleave(copies, 0).flatten(0, 1) for rows in (weight, bias))
        found[letter] = weight, None if none else bias
    return found
