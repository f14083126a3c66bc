"""Replaces attention in windows that the model or the layer has cut: Swin, Swin V2, DaViT, TinyViT, Twins; LeViT's."""

import math
from types import SimpleNamespace
from typing import Any, ClassVar

from timm.models import davit, levit, swin_transformer, swin_transformer_v2, tiny_vit, twins
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.backbones.timm.hosts import Model, ReplacedAttention
from linvit.errors import UserError
from linvit.layers.hosting import queries_keys_values
from linvit.layers.windows import Windows
from linvit.registry import Spec


class ReplacedSwinAttention(ReplacedAttention):
    """Replaces attention inside windows. A mechanism that accepts no bias gets no shift mask either."""

    sources: ClassVar[Any] = (swin_transformer.WindowAttention, davit.WindowAttention)
    kept = ReplacedAttention.kept | {"relative_position_bias_table"}

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        super().__init__(source, spec, Grid(tuple(source.window_size)))
        self.refuse_stem("Swin, Swin V2 and DaViT")

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Maps (B n, h w, C) to (B n, h w, C) with a mask (n, h w, h w) for the n windows of an image."""
        height, width = self.window_size
        if mask is not None:
            mask = mask[:, None].repeat(x.shape[0] // mask.shape[0], 1, 1, 1)  # (B n, 1, h w, h w)
        return self.mix(x, Grid((height, width)), bias=mask)


class ReplacedSwinV2Attention(ReplacedSwinAttention):
    """Replaces Swin V2's attention: q and k of length 1, and q times a learnt factor, for every mechanism.

    Paper: Liu et al. 2022, "Swin Transformer V2: Scaling Up Capacity and Resolution", Section 3.3.
    """

    sources = (swin_transformer_v2.WindowAttention,)
    kept = ReplacedAttention.kept | {"logit_scale", "cpb_mlp"}
    set_window_size = swin_transformer_v2.WindowAttention.set_window_size
    init_non_persistent_buffers = swin_transformer_v2.WindowAttention._init_buffers
    k_bias = None  # the base class would fill it with zeros
    _make_pair_wise_relative_positions = swin_transformer_v2.WindowAttention._make_pair_wise_relative_positions

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        super().__init__(source, spec, model, name)
        self.logit_scale = source.logit_scale if "q" in self.projections else None
        self.cpb_mlp = source.cpb_mlp if self.mechanism.host.accepts_bias else None
        self.pretrained_window_size = source.pretrained_window_size
        for buffer in ("relative_coords_table", "relative_position_index"):
            self.register_buffer(buffer, getattr(source, buffer), persistent=False)

    def norm_queries(self, q: Tensor) -> Tensor:
        """Normalises each head's channels to length 1, times the learnt factor; undoes softmax's 1 / sqrt(d)."""
        if self.logit_scale is None:
            return q
        scale = self.logit_scale.clamp(max=math.log(100)).exp() * math.sqrt(self.mechanism.key_dim)  # (h, 1, 1)
        return (F.normalize(q.unflatten(2, (len(scale), -1)), dim=-1) * scale.squeeze(-1)).flatten(2)  # type: ignore[no-any-return]

    def norm_keys(self, k: Tensor) -> Tensor:
        """Normalises each head's channels to length 1."""
        return F.normalize(k.unflatten(2, (self.mechanism.num_heads, -1)), dim=-1).flatten(2)

    def position_bias(self, q: Tensor, grid: Grid) -> Tensor | None:
        """Returns the bias of relative positions from a small network, (1, h, N, N)."""
        if self.cpb_mlp is None:
            return None
        table = 16 * self.cpb_mlp(self.relative_coords_table).flatten(0, -2).sigmoid()
        return table[self.relative_position_index].permute(2, 0, 1)[None]  # type: ignore[no-any-return]


class ReplacedTinyViTAttention(ReplacedAttention):
    """Replaces TinyViT's attention in windows, which has its own norm before it."""

    sources: ClassVar[Any] = (tiny_vit.Attention,)
    kept = ReplacedAttention.kept | {"norm", "attention_biases"}
    per_head = True
    init_non_persistent_buffers: Any = tiny_vit.Attention._init_buffers

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        super().__init__(source, spec, Grid(tuple(source.resolution)))
        self.refuse_stem("TinyViT")
        self.norm = source.norm
        self.keep_biases(source)

    def keep_biases(self, source: Any) -> None:
        """Keeps the table of biases for a mechanism that accepts one."""
        self.resolution = source.resolution
        self.attention_biases = source.attention_biases if self.mechanism.host.accepts_bias else None
        self.register_buffer("attention_bias_idxs", source.attention_bias_idxs, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B n, h w, C) -> (B n, h w, C)."""
        return self.mix(self.norm(x), self.mechanism.grid)

    def position_bias(self, q: Tensor, grid: Grid) -> Tensor | None:
        """Returns the bias of absolute distances in rows and columns, (1, h, N, N)."""
        return None if self.attention_biases is None else self.attention_biases[None, :, self.attention_bias_idxs]


class ReplacedLeViTAttention(ReplacedTinyViTAttention):
    """Replaces LeViT's attention within a stage; the attention that halves the map between stages is kept."""

    sources = (levit.Attention,)
    kept = ReplacedAttention.kept | {"attention_biases"}
    init_non_persistent_buffers: Any = levit.Attention._init_buffers
    _compute_attention_bias_idxs = levit.Attention._compute_attention_bias_idxs

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        if source.use_conv:
            raise UserError("linvit cannot replace the attention of timm's levit_conv; use levit, with linear layers")
        linear = SimpleNamespace(
            qkv=source.qkv.linear, proj=source.proj.ln.linear, num_heads=source.num_heads, key_dim=source.key_dim
        )
        ReplacedAttention.__init__(self, linear, spec, Grid(tuple(source.resolution)))
        if self.projections != "qkv":
            raise UserError(
                f"LeViT's projections have one BatchNorm for q, k and v, and {type(self.mechanism).__name__} projects "
                f"'{self.projections}'. Take another attention for it"
            )
        self.keep_biases(source)
        source.qkv.linear, source.proj.ln.linear = self.qkv, self.proj
        self.qkv, self.proj = source.qkv, source.proj

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        return self.mix(x, self.mechanism.grid)


class ReplacedTwinsAttention(ReplacedAttention):
    """Replaces Twins' attention within groups of neighbours, zero-padded as there."""

    sources = (twins.LocallyGroupedAttn,)

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        super().__init__(source, spec, Grid((source.ws, source.ws)))

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Maps (B, N, C) to (B, N, C) for the plane (H, W)."""
        windows = Windows((size[0], size[1]), self.mechanism.grid.size)
        t = self.stemmed(x, Grid(windows.size))
        parts = windows.partition(t)
        q, k, v = queries_keys_values(self.mechanism, self.projected(parts), parts)
        out = windows.reverse(self.attended(parts, q, k, v, self.mechanism.grid))
        return self.project(out, x)
