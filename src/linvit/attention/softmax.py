"""Softmax attention: `o = softmax(q k^T / sqrt(d) + bias) v`.

Paper: Vaswani et al. 2017, "Attention Is All You Need", Eq. 1. The baseline of every comparison.
Cost: `N M (h dk + C)` MACs, O(N) memory with the fused kernel; `lepe_kernel` adds `k^2 N C`. Rank: up to N.

With `rotary`, `lepe_kernel` and `gate` it is the softmax attention of RAVLT, MAViT, NaLaFormer and PolaFormer++:
`o = softmax(rot(q) rot(k)^T / sqrt(d)) v + conv(v)`, with a gate by the host.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.attention.declarations import Facts, Gate, Host, OutNorm
from linvit.attention.ops.decorators import full_precision
from linvit.attention.ops.rotary import check_rotary, rotate
from linvit.attention.ops.value_conv import ConvolvedAttention, value_conv
from linvit.errors import check_number


class SoftmaxAttention(ConvolvedAttention):
    """Scaled dot-product attention, O(N^2), through torch's fused kernel.

    Args:
        qk_scale: Factor on the logits; None means 1 / sqrt(key_dim).
        qk_norm: LayerNorm on every head's queries and keys.
        attn_drop: Dropout rate on the attention weights.
        rotary: Turn queries and keys by their rows and columns (see `linvit.attention.ops.rotary`); key_dim must then
            be a multiple of 4.
        lepe_kernel: Side of the kernels of a depthwise convolution of the values, which is added; 0 is none.
        gate: Factor of the output; see `linvit.Host`.
        out_norm: Norm of the output, before the gate; see `linvit.Host`.
        fused: Use `torch.nn.functional.scaled_dot_product_attention`; False writes the formula out.
    """

    host = Host(accepts_bias=True)
    facts = Facts(complexity="O(N^2)")
    precision = "inherit"
    recompute = False
    convolution = "lepe"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        qk_scale: float | None = None,
        qk_norm: bool = False,
        attn_drop: float = 0.0,
        rotary: bool = False,
        lepe_kernel: int = 0,
        gate: Gate = "none",
        out_norm: OutNorm = "none",
        fused: bool = True,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        if qk_scale is not None:
            check_number("qk_scale", qk_scale, above=0, note=", or null for 1 / sqrt(key_dim)")
        check_number("attn_drop", attn_drop, at_least=0, at_most=1)
        self.scale = self.key_dim**-0.5 if qk_scale is None else qk_scale
        self.q_norm = nn.LayerNorm(self.key_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.key_dim) if qk_norm else nn.Identity()
        self.attn_drop = attn_drop
        if rotary:
            check_rotary(dim, num_heads, self.key_dim)
        self.lepe = value_conv("lepe_kernel", dim, lepe_kernel)
        self.declare(
            rotary=rotary,
            channelwise=self.lepe is not None,
            equivariant=not rotary and self.lepe is None,
            gate=gate,
            norm=out_norm,
        )
        self.fused = fused

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, bias: Tensor | None = None) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d); `bias` broadcasts to (B, h, N, M)."""
        q, k = self.q_norm(q), self.k_norm(k)
        if self.facts.rotary:
            q, k = rotate(q, k, grid)
        dropout = self.attn_drop if self.training else 0.0
        if self.fused and (q.shape[0] or not q.is_cuda):  # of no image CUDA's returns None (torch 2.11)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=self.scale)
            return out.to(v.dtype)
        return self._written_out(q, k, v, bias, dropout)

    @full_precision
    def _written_out(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
        logits = (q * self.scale) @ k.mT
        if bias is not None:
            logits = logits + bias
        return F.dropout(logits.softmax(-1), dropout) @ v
