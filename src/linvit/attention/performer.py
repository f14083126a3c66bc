"""Performer attention (FAVOR+): `o = phi(q) (phi(k)^T v) / (phi(q) sum_n phi(k_n))` with random features phi.

`phi(x) = m^-1/2 exp(W x' - ||x'||^2 / 2)` with `x' = x / dk^(1/4)` and m random rows W: the mean of `phi(q) phi(k)^T`
over W is the softmax kernel `exp(q k^T / sqrt(dk))`. Orthogonal rows make its variance smaller.

Paper: Choromanski et al. 2021, "Rethinking Attention with Performers", Lemma 1.
Cost: `(N + M) (h dk + C) m + N h m` MACs. Rank: at most m, the number of features.

For numerical stability the largest `W x'` is subtracted in the exponent, for queries per token, for keys over all
tokens of a head; this cancels in the quotient but for `kernel_eps`, which is added to phi.
"""

import math
import random
from typing import Literal

import torch
from torch import Tensor
from torch.utils.module_tracker import ModuleTracker

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.linear import key_max, key_softmax, linear_attention, linear_factors
from linvit.attention.packed import Packed
from linvit.errors import check_number


class PerformerAttention(Attention):
    """Linear attention with positive orthogonal random features, O(N m d).

    Args:
        nb_features: Random features m; None means int(dk ln dk).
        kernel: "softmax": the features above. "relu" and "exp": `f(W x') + kernel_eps`, which approximates no softmax
            (the reference's generalized attention). "none": `softmax(q)` over channels and `softmax(k)` over tokens,
            without W; this is efficient attention.
        kernel_eps: Added to the features; None means 1e-4 for "softmax" and 1e-3 for "relu" and "exp". With 0 and
            "softmax" or "relu", a query whose features all vanish gives NaN.
        ortho_scaling: Lengths of the rows of W: 0: those of Gaussian vectors; 1: all sqrt(dk).
        redraw_interval: Draws a new W every so many forward passes in training mode; None never does. A pass that
            gradient checkpointing repeats does not count. The count is read on the host, which costs a device
            synchronisation per training pass.
        seed: Seed of all W; the n-th W depends on it and on n alone, not on the device. None takes one from torch's
            global generator, another for each layer. It is saved in checkpoints with W and the number of passes, so
            that a resumed run continues with the W of an uninterrupted one.
    """

    facts = Facts(complexity="O(N)", equivariant=True, packs=True)
    projection_matrix: Tensor | None
    seed: Tensor
    passes: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        nb_features: int | None = None,
        kernel: Literal["softmax", "relu", "exp", "none"] = "softmax",
        kernel_eps: float | None = None,
        ortho_scaling: Literal[0, 1] = 0,
        redraw_interval: int | None = 1000,
        seed: int | None = None,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        if nb_features is None:
            nb_features = max(1, int(self.key_dim * math.log(self.key_dim)))
        if kernel_eps is None:
            kernel_eps = 1e-4 if kernel == "softmax" else 1e-3
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        check_number("nb_features", nb_features, at_least=1, whole=True, note=", or null for int(dk ln dk)")
        check_number("kernel_eps", kernel_eps, at_least=0, note=", as it keeps the features positive")
        lengths = ": 0 for Gaussian lengths, 1 for sqrt(dk)"
        check_number("ortho_scaling", ortho_scaling, at_least=0, at_most=1, whole=True, note=lengths)
        if redraw_interval is not None:
            check_number("redraw_interval", redraw_interval, at_least=1, whole=True, note=", or null for never")
        check_number("seed", seed, at_least=0, below=2**63, whole=True, note=" (2^63), or null for one at random")
        self.nb_features = self.key_dim if kernel == "none" else nb_features
        self.kernel = kernel
        self.declare(max_rank=self.nb_features, mask_value=-math.inf if kernel == "none" else None)
        self.kernel_eps = kernel_eps
        self.ortho_scaling = ortho_scaling
        self.redraw_interval = None if kernel == "none" else redraw_interval
        weight = None if kernel == "none" else draw((nb_features, self.key_dim), ortho_scaling, seed, 0)
        self.register_buffer("projection_matrix", None if weight is None else weight.to(torch.get_default_dtype()))
        self.register_buffer("seed", torch.tensor(seed))
        self.register_buffer("passes", torch.tensor(0))
        self._known = (-1, 0)  # a version of the counter, and its value then

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        if self.training and self.redraw_interval is not None and not _recomputing():
            if torch.compiler.is_compiling() or self._is_due(self.redraw_interval):
                weight = redraw(
                    self.projection_matrix, self.seed, self.passes, self.redraw_interval, self.ortho_scaling
                )
                self.projection_matrix.copy_(weight)  # type: ignore[union-attr]
            self.passes.add_(1)
            if not torch.compiler.is_compiling():
                self._known = self.passes._version, self._known[1] + 1
        # A copy of W: a later redraw must not change this pass's gradients.
        weight = None if self.projection_matrix is None else self.projection_matrix.clone()
        return self.core(q, k, v, grid, weight=weight)

    def _is_due(self, interval: int) -> bool:
        """Returns True if the next pass draws a new W. The counter is read after it was set, not in every pass."""
        if self._known[0] != self.passes._version:
            self._known = self.passes._version, int(self.passes)
        return self._known[1] % interval == 0

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, weight: Tensor | None) -> Tensor:
        """Returns the linear attention on random features of this W."""
        keys, level = self._key_features(k, weight, grid)
        return linear_attention(self._query_features(q, level, weight), keys, v, 0.0, grid=grid)

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Random features of q (B, h, N, dk) and k (B, h, M, dk): (B, h, N, m), (B, h, M, m)."""
        keys, level = self._key_features(k, self.projection_matrix)
        return self._query_features(q, level, self.projection_matrix), keys

    def _key_features(
        self, k: Tensor, weight: Tensor | None, grid: Grid | Packed | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the features (B, h, M, m), and for "exp" the logarithm (B, h, 1, m) of their divisor.

        The divisor is the largest value of each, to prevent overflow; it cancels in the quotient.
        """
        if weight is None:
            return key_softmax(k, grid), None
        u = self._projected(k, weight)
        if self.kernel == "softmax":
            return self._softmax_features(k, u, key_max(u.detach(), grid, (-2, -1))), None
        if self.kernel == "relu":
            return self._relu_features(u), None
        level = key_max(u.detach(), grid).clamp_min(self._floor)
        return u.sub_(level).exp_() + (self._floor - level).exp(), level

    def _query_features(self, q: Tensor, level: Tensor | None, weight: Tensor | None) -> Tensor:
        """Returns the features (B, h, N, m), for "exp" multiplied by the divisor of the keys.

        For "exp" each query is also divided by its largest feature, so that the denominator is at least 1.
        """
        if weight is None:
            return q.softmax(-1)
        u = self._projected(q, weight)
        if self.kernel == "softmax":
            return self._softmax_features(q, u, u.detach().amax(-1, keepdim=True))
        if level is None:
            return self._relu_features(u)
        shift = level - u.detach().clamp_min(self._floor).add_(level).amax(-1, keepdim=True)
        return u.add_(shift).exp_() + shift.add_(self._floor).exp_()

    def _projected(self, x: Tensor, weight: Tensor) -> Tensor:
        """`W x'`, (B, h, N, m)."""
        u: Tensor = x @ (weight.to(x.dtype) / self.key_dim**0.25).mT
        return u

    def _softmax_features(self, x: Tensor, u: Tensor, peak: Tensor) -> Tensor:
        """`m^-1/2 (exp(u - ||x'||^2 / 2 - peak) + kernel_eps)`, which overwrites u; the peak of u prevents overflow."""
        half_norm = torch.linalg.vecdot(x, x).unsqueeze(-1) / (2 * self.key_dim**0.5)
        features: Tensor = u.sub_(half_norm + peak + math.log(self.nb_features) / 2).exp_()
        return features.add(self.kernel_eps / self.nb_features**0.5)

    def _relu_features(self, u: Tensor) -> Tensor:
        """`relu(u) + kernel_eps`; overwrites u."""
        return torch.threshold_(u.add_(self.kernel_eps), self.kernel_eps, self.kernel_eps)

    @property
    def _floor(self) -> float:
        """The logarithm of `kernel_eps`."""
        return math.log(self.kernel_eps) if self.kernel_eps else -math.inf

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`diag(1 / (Q K^T 1)) Q` and `K`."""
        return linear_factors(*self.features(q, k), eps=0.0)


def draw(shape: tuple[int, ...], ortho_scaling: int, seed: int, number: int) -> Tensor:
    """Draws the `number`-th matrix W (m, dk) of a seed in float64: blocks of dk orthogonal rows, random lengths."""
    rows, width = shape
    mixed = random.Random(f"{seed}, {number}").getrandbits(32)  # torch's CPU generator uses 32 bits of a seed
    generator = torch.Generator("cpu").manual_seed(mixed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    q, r = torch.linalg.qr(normal(-(-rows // width), width, width))
    # LAPACK's Q is not uniformly distributed (its first column has a fixed sign); with a positive diagonal of R it is.
    directions = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.flatten(0, 1)[:rows]
    lengths = normal(rows, width).norm(dim=-1, keepdim=True) if ortho_scaling == 0 else width**0.5
    weight: Tensor = directions * lengths
    return weight


# A custom operator, since a compiled graph cannot read the value of a counter. It modifies nothing in place.
@torch.library.custom_op("linvit::performer_redraw", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def redraw(weight: Tensor, seed: Tensor, passes: Tensor, interval: int, ortho_scaling: int) -> Tensor:
    """Returns W for the coming pass: a new one after every `interval` passes, else a copy of the present one."""
    number, since = divmod(int(passes), interval)
    if number == 0 or since:
        return weight.clone()
    return draw(weight.shape, ortho_scaling, int(seed), number).to(weight)


@redraw.register_fake
def _(weight: Tensor, seed: Tensor, passes: Tensor, interval: int, ortho_scaling: int) -> Tensor:
    return torch.empty_like(weight)


def _recomputing() -> bool:
    """Returns True in a forward pass inside a backward pass: gradient checkpointing repeats it, W must not change."""
    return not torch.compiler.is_compiling() and ModuleTracker().is_bw
