"""What all layers have in common that replace attention in timm models, and what tells them their tokens' grid."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from timm.layers import apply_rot_embed_cat, gen_relative_position_index, resize_rel_pos_bias_table
from torch import Tensor, nn

from linvit.attention.base import Attention, Grid
from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.layers.hosting import AttentionHost, attend, queries_keys_values
from linvit.layers.projections import Rows, joined, widened
from linvit.registry import Spec, attentions

ACCEPTED = "take one of timm's models that the README lists, such as vit_tiny_patch16_224"
"""Ends the messages about models whose attention cannot be replaced."""


class PatchGrid:
    """Records the patch grid of a model's images, as a forward pre-hook of its patch embedding."""

    def __init__(self, patch_embed: Any, size: tuple[int, int], num_prefix: int) -> None:
        self.grid = Grid(size, num_prefix=num_prefix)
        patch_embed.register_forward_pre_hook(self)

    def __call__(self, patch_embed: Any, args: tuple[Tensor, ...]) -> None:
        """Records the grid of images (B, C, H, W) before they are embedded."""
        height, width = patch_embed.dynamic_feat_size(args[0].shape[-2:])
        self.grid = self.grid._replace(size=(height, width))


class Model:
    """A model of timm whose attention is replaced, and the size of its images."""

    def __init__(self, network: Any, img_size: int | Sequence[int]) -> None:
        self.network = network
        self.img_size = image_size(img_size)

    @cached_property
    def patches(self) -> PatchGrid:
        """The patch grid of the model's images, which all its layers share."""
        embed: Any = getattr(self.network, "patch_embed", None)
        if not hasattr(embed, "dynamic_feat_size"):
            raise UserError(
                f"{type(self.network).__name__} has no patch embedding that tells the grid of its tokens; {ACCEPTED}"
            )
        size = getattr(embed, "grid_size", None) or embed.dynamic_feat_size(self.img_size)
        return PatchGrid(embed, tuple(size), self.network.num_prefix_tokens)

    def level(self, name: str) -> tuple[int, int]:
        """The plane (H, W) of the level of the pyramid that a module belongs to."""
        levels = self.network.feature_info
        stride = next(level["reduction"] for level in levels if name.startswith(f"{level['module']}."))
        height, width = self.img_size
        return -(-height // stride), -(-width // stride)


class ReplacedAttention(AttentionHost):
    """A mechanism between the projections of one of timm's attention modules, (B, N, C) -> (B, N, C).

    Kept are the rows of the q, k, v projections that the mechanism projects, the norms of q and k, and the output
    projection. Where a mechanism widens its output, the projection's further columns get initial values. A relative
    position bias is kept for a mechanism that takes one. Stem, norm and gate are new where the mechanism declares them,
    and the gate is 1 at first.

    A subclass names the classes that it replaces, is built as `(source, spec, model, name)`, with the module, the
    `Model` around it and its path there, and has the module's `forward`. It is entered in the table in `attention.py`.
    """

    sources: ClassVar[tuple[type[nn.Module], ...]]
    kept: ClassVar[set[str]] = {"qkv", "q_proj", "k_proj", "v_proj", "q_bias", "v_bias", "q_norm", "k_norm", "proj"}
    """Of the source's parameters, those that stay; one with others is refused."""

    def __init__(self, source: Any, spec: Spec, grid: Grid) -> None:
        super().__init__()
        dim, heads = source.proj.in_features, source.num_heads
        self.mechanism: Attention = attentions.create(spec, dim=dim, num_heads=heads, grid=grid)
        if (self.mechanism.num_heads, self.mechanism.dim, self.mechanism.proj_norm) != (heads, dim, "none"):
            raise UserError(
                f"a timm model keeps its {heads} heads of {dim // heads} channels and its output projection without a "
                f"norm; {spec} asks for {self.mechanism.num_heads} heads of {self.mechanism.head_dim} channels and "
                f"proj_norm '{self.mechanism.proj_norm}'. Leave these options out, or take one of linvit's backbones"
            )
        if self.mechanism.key_dim != self.mechanism.head_dim:
            raise UserError(
                f"the keys of a timm model have {self.mechanism.head_dim} channels per head, and its projections are "
                f"kept; {type(self.mechanism).__name__} wants {self.mechanism.key_dim}. Leave out what sets their width"
            )
        self.surround([self.mechanism], dim, reduced=grid.kv_size is not None)
        rows = projection_rows(source)
        if grid.kv_size is None:
            self.qkv = joined(rows, self.projections)
        else:
            self.q, self.kv = joined(rows, "q"), joined(rows, "kv")
        if self.gate is not None:
            self.gate.init_open()
        for part in (self.mechanism, self.stem, self.out_norm, self.gate):
            if part is not None:
                part.to(source.proj.weight)
        norms = {"q": getattr(source, "q_norm", None), "k": getattr(source, "k_norm", None)}
        self.q_norm, self.k_norm = (
            norm if norm is not None and letter in self.projections else nn.Identity() for letter, norm in norms.items()
        )
        table = getattr(source, "relative_position_bias_table", None)
        self.relative_position_bias_table = table if self.mechanism.takes_bias else None
        if self.relative_position_bias_table is not None:
            self.register_buffer("relative_position_index", source.relative_position_index, persistent=False)
        self.window_size: Any = getattr(source, "window_size", None)
        self.rotate_half: bool = getattr(source, "rotate_half", False)
        self.norm: nn.Module | None = None  # of what is mixed
        self.proj = widened(source.proj, self.mechanism.out_dim, heads)
        self.proj_drop = source.proj_drop

    def mix(self, x: Tensor, grid: Grid, bias: Tensor | None = None, rope: Tensor | None = None) -> Tensor:
        """Projects tokens (B, N, C) and attends, with a bias (B or 1, h, N, N) for a mechanism that takes one.

        `rope` are sines and cosines (..., N, 2 d) of timm for the patches, by which q and k are turned.
        """
        t = self.stemmed(x, grid)
        q, k, v = queries_keys_values(self.mechanism, self.qkv(t).split(self.widths, -1), t)
        return self.finish(x, t, q, k, v, grid, bias, rope)

    def stemmed(self, x: Tensor, grid: Grid) -> Tensor:
        """Applies the stem, if the mechanism has one, to the tokens (B, N, C) of a grid."""
        if x.shape[1] != grid.num_queries:
            raise UserError(
                f"got {x.shape[1]} tokens, but the last images that this model embedded have {grid.size[0]}x"
                f"{grid.size[1]} patches and {grid.num_prefix} prefix tokens. With checkpointing, run backward before "
                f"images of another size go forward; without, let no layer drop or add tokens"
            )
        return x if self.stem is None else self.stem(x, grid)

    def finish(
        self,
        x: Tensor,
        t: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Grid,
        bias: Tensor | None = None,
        rope: Tensor | None = None,
    ) -> Tensor:
        """Attends and returns the layer's output (B, N, C)."""
        tied = k is q
        q = self._placed(self.q_norm, q, grid.num_prefix, rope)
        k = q if tied else self._placed(self.k_norm, k, grid.num_prefix, rope)
        table = self.relative_position_bias_table
        if table is not None:
            index = self.relative_position_index
            own = table[index.flatten()].unflatten(0, index.shape).permute(2, 0, 1)[None]  # (1, h, N, N)
            bias = own if bias is None else own + bias
        out = attend(self.mechanism, q, k, v, grid, x=t, bias=bias if self.mechanism.takes_bias else None)
        return self.project(out if self.norm is None else self.norm(out), x)

    def _placed(self, norm: nn.Module, x: Tensor, prefix: int, rope: Tensor | None) -> Tensor:
        """Applies a norm over the channels of each head and turns those of the patches, (B, N, C) -> (B, N, C)."""
        if isinstance(norm, nn.Identity) and rope is None:
            return x
        heads: Tensor = norm(x.unflatten(2, (self.mechanism.num_heads, -1)))  # (B, N, h, d)
        if rope is not None:
            patches = heads[:, prefix:].transpose(1, 2)
            turned = apply_rot_embed_cat(patches, rope, half=self.rotate_half).transpose(1, 2)
            heads = torch.cat([heads[:, :prefix], turned], dim=1)
        return heads.flatten(2)

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Sets another window size, as timm's method of this name does, and resizes the table of relative positions."""
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
        """Makes the table's index again, as timm's method of this name does; transformers calls it."""
        table = self.relative_position_bias_table
        if table is not None:
            height, width = self.window_size
            special = len(table) > (2 * height - 1) * (2 * width - 1)  # rows for the class token
            index = gen_relative_position_index((height, width), class_token=special)
            self.relative_position_index = index.to(table.device)


def projection_rows(source: Any) -> Rows:
    """Returns weight and bias of the q, k and v projections of timm's module; a missing bias among others is 0."""
    fused = getattr(source, "qkv", None)
    if fused is not None:
        bias = fused.bias
        if getattr(source, "q_bias", None) is not None:  # BEiT: no bias of the keys
            bias = torch.cat([source.q_bias, torch.zeros_like(source.q_bias), source.v_bias])
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return dict(zip("qkv", zip(fused.weight.chunk(3), biases, strict=True), strict=True))
    if hasattr(source, "kv"):
        biases = (None, None) if source.kv.bias is None else source.kv.bias.chunk(2)
        pairs = [(source.q.weight, source.q.bias), *zip(source.kv.weight.chunk(2), biases, strict=True)]
        return dict(zip("qkv", pairs, strict=True))
    layers = (source.q_proj, source.k_proj, source.v_proj)
    none = all(layer.bias is None for layer in layers)
    found = {}
    for letter, layer in zip("qkv", layers, strict=True):
        weight, bias = layer.weight, layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
        copies = source.proj.in_features // len(weight)  # more than 1 where heads share keys and values
        weight, bias = (rows.unflatten(0, (-1, source.head_dim)) for rows in (weight, bias))
        weight, bias = (rows.repeat_interleave(copies, 0).flatten(0, 1) for rows in (weight, bias))
        found[letter] = weight, None if none else bias
    return found
