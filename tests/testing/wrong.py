"""One sound mechanism, and one for each way of being wrong that changes a single thing in it."""

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit import Attention, Facts, Grid, Host
from linvit.attention.ops.functional import SizeOf, resize_table, resize_tokens
from tests.testing.helpers import changed, name_classes, refuse

LARGE = 1000  # tokens


class Sound(Attention):
    """Linear attention with elu + 1 features and a learnable scale of the queries: keeps the whole contract.

    `given` and `result` are there to be changed: the inputs of the formula, and its output.
    """

    facts = Facts(complexity="O(N)")

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.scale = nn.Parameter(torch.ones(self.key_dim))

    def given(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

    def result(self, out: Tensor, grid: Grid) -> Any:
        return out

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> Any:
        q, k, _ = self.given(q, k, k, grid)
        q, k = F.elu(q * self.scale.to(q.dtype)) + 1, F.elu(k) + 1
        return q / (q @ k.sum(-2).unsqueeze(-1) + 1e-6), k

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        left, right = Sound.factors(self, q, k, grid)
        return left @ (right.mT @ self.given(q, k, v, grid)[2])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return self.result(self.core(q, k, v, grid), grid)


def with_keys(change: Callable[[Any, Tensor], Tensor], base: type = Sound, **members: Any) -> Any:
    """One with other keys than it is given."""
    return changed(base, given=lambda self, q, k, v, grid: (q, change(self, k), v), **members)


def with_values(change: Callable[[Tensor], Tensor], **members: Any) -> Any:
    return changed(Sound, given=lambda self, q, k, v, grid: (q, k, change(v)), **members)


def with_result(change: Callable[[Tensor, Grid], Any], base: type = Sound) -> Any:
    return changed(base, result=lambda self, out, grid: change(out, grid))


# What cannot be read


class CrashesAtConstruction(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raise RuntimeError("out of luck\nand more")


class TakesOnlyDim(Attention):
    def __init__(self, dim: int) -> None:
        super().__init__(dim, 1, Grid((14, 14)))


class NeedsAnOption(Sound):
    def __init__(self, dim: int, num_heads: int, grid: Grid, *, width: int) -> None:
        super().__init__(dim, num_heads, grid)


class NarrowByDefault(Sound):
    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int = 8) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)


class FractionalWidth(Sound):
    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.out_dim = 1.5 * dim


OneFactor = changed(Sound, factors=lambda self, q, k, grid: q)
ReturnsItsState = with_result(lambda out, grid: (out, grid))
ExitsInForward = with_result(lambda out, grid: sys.exit("no licence"))

# Shapes and sizes


class FixedLength(Sound):
    """A parameter per key, never resized."""

    refusal = ""

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.position = nn.Parameter(torch.zeros(grid.num_keys, self.key_dim))

    def given(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        if self.refusal and grid.num_keys != len(self.position):
            refuse(self.refusal.format(*grid.size))
        return q, k + self.position.to(k.dtype), v


class RemembersTheLargestGrid(Sound):
    """An earlier call at a larger grid changes a later one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.largest = 0

    def result(self, out: Tensor, grid: Grid) -> Any:
        self.largest = max(self.largest, grid.num_keys)
        return out / self.largest


class ResizesItsTable(Sound):
    """With a learnable gain per patch, as it should be."""

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.gain = nn.Parameter(torch.ones(1, math.prod(grid.keys_size), 1))

    def given(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        gain = resize_tokens(self.gain.to(k.dtype), self.grid.keys_size, grid.keys_size, "bilinear")
        return q, k * F.pad(gain, (0, 0, grid.num_prefix, 0), value=1.0), v

    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        state["gain"] = resize_table(state["gain"], self.gain, self.grid.keys_size, size_of, "bilinear")
        return state


ReturnsFloat32 = with_result(lambda out, grid: out.float())
SquareOnly = with_result(lambda out, grid: out.unflatten(2, [math.isqrt(out.shape[2])] * 2).flatten(2, 3))
RefusesAnotherLength = changed(FixedLength, refusal="built for 196 keys, got a grid of {}x{}")
RefusesWithoutASize = changed(FixedLength, refusal="not this grid")
RefusesToBeLarge = with_result(lambda out, grid: out if out.shape[2] <= LARGE else refuse("at most 1000 tokens"))
KeepsItsTable = changed(ResizesItsTable, resize_tables=Attention.resize_tables)

# What hosts ask


class HidesItsBias(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, bias: Tensor | None = None) -> Tensor:
        out = super().forward(q, k, v, grid)
        return out if bias is None else out + 0 * bias.mean()


IgnoresItsBias = changed(HidesItsBias, host=Host(accepts_bias=True))
IgnoresPrefix = changed(
    Sound,
    forward=lambda self, q, k, v, grid: F.pad(
        Sound.forward(self, *(x[:, :, grid.num_prefix :] for x in (q, k, v)), grid), (0, 0, grid.num_prefix, 0)
    ),
)
RefusesPrefix = with_result(lambda out, grid: refuse("no place for prefix tokens") if grid.num_prefix else out)
NeedsAllKeys = changed(Sound, given=lambda self, q, k, v, grid: (q, k + q, v))
DeclaresAllKeys = changed(NeedsAllKeys, facts=Facts(same_grid=True))
NeedsContiguous = with_keys(lambda self, k: k.view(-1).view(k.shape))
CountsMaskedKeys = changed(
    Sound, facts=Facts(equivariant=True, mask_value=0.0)
)  # whose features are ones, and not nothing

# Calls, samples, training and copies


class DeadParameter(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unused = nn.Parameter(torch.ones(3))


class WritesToItsInput(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        out = super().forward(q, k, v, grid)
        with torch.no_grad():
            v.mul_(2)
        return out


class Counts(Sound):
    """A call in evaluation changes the state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("calls", torch.zeros(()))

    def result(self, out: Tensor, grid: Grid) -> Any:
        self.calls += 1
        return out


class ForgetsItsBuffer(Sound):
    """Random numbers that the state dict does not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("directions", torch.randn(self.key_dim), persistent=False)

    def given(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        return q * self.directions, k, v


class KeepsALambda(Sound):
    """No pickle."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = lambda x: x


BatchCoupled = with_keys(lambda self, k: k / k.abs().amax())
BatchCoupledInTraining = with_keys(lambda self, k: k / k.abs().amax() if self.training else k)
DropsInTraining = changed(Sound, result=lambda self, out, grid: F.dropout(out, 0.1, self.training))  # as it should be
DropsAndCouplesInTraining = changed(BatchCoupledInTraining, result=DropsInTraining.result)
Random = with_result(lambda out, grid: out + 1e-13 * torch.randn_like(out))  # too small for any tolerance

# The matrix, the order of tokens, the work


class Quadratic(Sound):
    """Torch's fused kernel writes no N x M matrix, but takes its time; still declared O(N)."""

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return F.scaled_dot_product_attention(q * self.scale.to(q.dtype), k, v).to(v.dtype)


SeesPlaces = with_keys(
    lambda self, k: k * torch.linspace(1, 2, k.shape[2], dtype=k.dtype)[:, None], facts=Facts(equivariant=True)
)
NonLinearInValues = with_values(torch.tanh)
PerChannel = with_values(lambda v: v * torch.linspace(1, 2, v.shape[-1], dtype=v.dtype))
MixesChannels = with_values(lambda v: v + v.roll(1, -1))
WithAnotherMatrix = with_values(  # that of `v`, and not of the values it mixes
    torch.tanh,
    facts=Facts(linear_in_values=False),
    attention_matrix=lambda self, q, k, v, grid: (x := self.factors(q, k, grid))[0] @ x[1].mT,
)
WrongFactors = changed(
    Sound, factors=lambda self, q, k, grid: (1.001 * (x := Sound.factors(self, q, k, grid))[0], x[1])
)
OfHigherRank = changed(Sound, facts=Facts(max_rank=4))
OfOneMatrix = changed(Sound, facts=Facts(channelwise=True))
SumsOverAllImages = changed(Sound, facts=Facts(packs=True))
DeclaredSlowerThanItIs = changed(Sound, facts=Facts(complexity="O(N^2)"))

# Precision


class CoarseGradientInHalf(Sound):
    """The output is right in every precision; the gradient of the keys keeps one binary digit."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        k = k.view_as(k)
        if k.requires_grad and k.dtype.itemsize == 2:
            k.register_hook(lambda gradient: gradient.sign() * 2 ** gradient.abs().log2().round())
        return super().forward(q, k, v, grid)


OverflowsInHalf = with_result(lambda out, grid: out * 2**20 / 2**20)
DividesByTheSpread = with_keys(lambda self, k: k / k.std(-2, correction=0, keepdim=True))  # 0 / 0 if tokens are alike
CoarseInBfloat16 = with_result(lambda out, grid: (out * 8).round() / 8 if out.dtype == torch.bfloat16 else out)

# Export

Bakes = changed(Sound, result=lambda self, out, grid: out if grid.size == self.grid.size else 2 * out)
DiffersCompiled = with_result(lambda out, grid: 2 * out if torch.compiler.is_compiling() else out)
BakesDeclared = changed(Bakes, exports_any_size=False)

name_classes(vars())
