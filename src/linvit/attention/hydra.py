"""Hydra attention: `o = phi_q(q) * sum_n phi_k(k_n) * v_n`, entry by entry; `phi(x) = x / ||x||` over all channels.

Paper: Bolya et al. 2022, "Hydra Attention: Efficient Attention with Many Heads". It is linear attention with as many
heads as channels: the usual heads are only a way to lay out the tensors here.
Cost: `(N + 2 M) C` elementwise operations and the kernels, no matrix product, O(C) memory. Rank: 1 per channel.
"""

import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts, OutNorm
from linvit.attention.ops.activations import ACTIVATIONS, normalize
from linvit.attention.ops.functional import channelwise_factors, upcast, wide
from linvit.attention.ops.linear import key_sum
from linvit.errors import check_number

CHANNELS = (1, 3)  # all channels of a token in (B, h, N, d): its heads and the channels within them
TOKENS = 2


KERNELS: dict[str, Callable[[Tensor, "HydraAttention", int], Tensor]] = {
    "l2": lambda x, options, keys: normalize(x, options.eps, 2, CHANNELS, wide(x)),
    "l1": lambda x, options, keys: normalize(x, options.eps, 1, CHANNELS, wide(x)),
    "constant": lambda x, options, keys: x / options.constant,
    "mean": lambda x, options, keys: x / math.sqrt(keys),
    "identity": lambda x, options, keys: x,
    "tanh": lambda x, options, keys: ACTIVATIONS["tanh"](x),
    "sigmoid": lambda x, options, keys: ACTIVATIONS["sigmoid"](x),
    "relu": lambda x, options, keys: ACTIVATIONS["relu"](x),
    "softmax_tokens": lambda x, options, keys: x.softmax(TOKENS),
    "softmax_features": lambda x, options, keys: (upcast(x) - upcast(x).logsumexp(CHANNELS, keepdim=True)).exp(),
}
"""Feature maps phi of x (B, h, N, d), with the mechanism's options and the number of keys M."""

KernelName = Literal[
    "l2", "l1", "constant", "mean", "identity", "tanh", "sigmoid", "relu", "softmax_tokens", "softmax_features"
]


class HydraAttention(Attention):
    """Attention with as many heads as channels, O(N d).

    A kernel is one of

    - "l2", "l1": x over its norm across all C channels;
    - "constant": x over a constant; "mean": x over sqrt(M), which on both sides gives the mean over the keys;
      "identity": x;
    - "tanh", "sigmoid", "relu": entry by entry;
    - "softmax_tokens": over the tokens, channel by channel; "softmax_features": over all C channels.

    "identity", "constant" and "relu" do not bound the output: it grows with the number of keys and the third power of
    the input, and overflows float16 (65,504) at 12,544 tokens of standard deviation 16, even if computed in float32.

    The paper finds that the keys' kernel should be linear and admit negative values; the queries' matters little.

    Args:
        kernel_q: phi_q.
        kernel_k: phi_k.
        post_norm: "ln": the host's LayerNorm over the C channels of the output, before its projection; "none".
        eps: Smallest norm that "l2" and "l1" divide by. The published code has none and gives NaN for a zero token.
        constant: What "constant" divides by; None means sqrt(C) (the paper's constant is not known).
    """

    facts = Facts(complexity="O(N)", same_width=True, equivariant=True, channelwise=True, max_rank=1, packs=True)
    precision = "mixed"
    eps: float
    constant: float

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        kernel_q: KernelName = "l2",
        kernel_k: KernelName = "l2",
        post_norm: OutNorm = "none",
        eps: float = 1e-12,
        constant: float | None = None,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        if constant is not None:
            check_number("constant", constant, above=0, note=", or null for sqrt(dim)")
        check_number("eps", eps, at_least=0)
        self.kernel_q = kernel_q
        self.kernel_k = kernel_k
        self.eps = eps
        self.constant = math.sqrt(dim) if constant is None else constant
        counts_tokens = {"mean", "softmax_tokens"} & {kernel_q, kernel_k}
        # Any number will do as the value of a masked key, since values of 0 have no weight.
        self.declare(
            norm=post_norm, mask_value=None if counts_tokens else 0.0, packs=self.facts.packs and not counts_tokens
        )

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, d), (B, h, M, d), (B, h, M, d) -> (B, h, N, d)."""
        q, k = self.features(q, k)
        return q * key_sum(k * v, grid, wide(v))

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Returns phi_q(q) (B, h, N, d) and phi_k(k) (B, h, M, d)."""
        keys = k.shape[TOKENS]
        return KERNELS[self.kernel_q](q, self, keys), KERNELS[self.kernel_k](k, self, keys)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`phi_q(q)_c` and `phi_k(k)_c` for every channel c."""
        return channelwise_factors(*self.features(q, k))
