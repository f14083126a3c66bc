"""One sound mechanism, and one for each way of being wrong that changes a single thing in it."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit import Attention, Grid, UserError
from linvit.attention.ops.decorators import full_precision
from linvit.attention.ops.functional import SizeOf, resize_table, resize_tokens


class Sound(Attention):
    """Linear attention with elu + 1 features and a learnable scale of the queries: keeps the whole contract."""

    complexity = "O(N)"

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.scale = nn.Parameter(torch.ones(self.key_dim))

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return F.elu(q * self.scale.to(q.dtype)) + 1, F.elu(k) + 1

    @full_precision
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        q, k = self.features(q, k)
        return q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1) + 1e-6)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        q, k = self.features(q, k)
        return q / (q @ k.sum(-2).unsqueeze(-1) + 1e-6), k

    def rank_bound(self, grid: Grid) -> int:
        return min(super().rank_bound(grid), self.key_dim)


class SeesPlaces(Sound):
    """Keys count the more, the later they come, though it declares that their order is nothing."""

    equivariant = True

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().features(q, k * torch.linspace(1, 2, k.shape[-2], dtype=k.dtype)[:, None])


class CrashesAtConstruction(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raise RuntimeError("out of luck\nand more")


class IgnoresItsBias(Sound):
    takes_bias = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, bias: Tensor | None = None) -> Tensor:
        out = super().forward(q, k, v, grid)
        return out if bias is None else out + 0 * bias.mean()


class CountsMaskedKeys(Sound):
    """Features of a key of zeros are ones, and not nothing."""

    equivariant = True
    masked_key = 0.0


class ResizesItsTable(Sound):
    """With a learnable gain per patch, as it should be."""

    mode = "bilinear"

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.gain = nn.Parameter(torch.ones(1, math.prod(grid.keys_size), 1))

    @full_precision
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return super().forward(q, self.weighted(k, grid), v, grid)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        return super().factors(q, self.weighted(k, grid), grid)

    def weighted(self, k: Tensor, grid: Grid) -> Tensor:
        gain = resize_tokens(self.gain.to(k.dtype), self.grid.keys_size, grid.keys_size, "bilinear")
        return k * F.pad(gain, (0, 0, grid.num_prefix, 0), value=1.0)

    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        state["gain"] = resize_table(state["gain"], self.gain, self.grid.keys_size, size_of, self.mode)
        return state


class ResizesItsTableOtherwise(ResizesItsTable):
    mode = "bicubic"


class KeepsItsTable(ResizesItsTable):
    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        return state


class BatchCoupled(Sound):
    """The keys' scale is the largest over the whole batch."""

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().features(q, k / k.abs().amax())


class BatchCoupledInTraining(Sound):
    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().features(q, k / k.abs().amax() if self.training else k)


class SquareOnly(Sound):
    """Recovers the grid by a square root."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        side = math.isqrt(k.shape[2] - grid.num_prefix)
        patches = k[:, :, grid.num_prefix :].unflatten(2, (side, side)).flatten(2, 3)
        return super().forward(q, torch.cat([k[:, :, : grid.num_prefix], patches], dim=2), v, grid)


class FixedLength(Sound):
    """A parameter per key, never resized."""

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.position = nn.Parameter(torch.zeros(grid.num_keys, self.key_dim))

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().features(q, k + self.position.to(k.dtype))


class RefusesAnotherLength(FixedLength):
    """The same, and says so."""

    words = "built for {0} keys, got a grid of {1}x{2}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        if grid.num_keys != len(self.position):
            raise UserError(self.words.format(len(self.position), *grid.size))
        return super().forward(q, k, v, grid)


class RefusesWithoutASize(RefusesAnotherLength):
    words = "not this grid"


class RemembersTheLargestGrid(Sound):
    """An earlier call at a larger grid changes a later one."""

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.largest = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        self.largest = max(self.largest, grid.num_keys)
        return super().forward(q, k, v, grid) / self.largest

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> None:
        return None


class IgnoresPrefix(Sound):
    """Patches see patches alone, and the prefix sees nothing."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        q, k, v = (x[:, :, grid.num_prefix :] for x in (q, k, v))
        return F.pad(super().forward(q, k, v, grid), (0, 0, grid.num_prefix, 0))

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> None:
        return None

    rank_bound = Attention.rank_bound


class RefusesPrefix(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        if grid.num_prefix:
            raise UserError("no place for prefix tokens here")
        return super().forward(q, k, v, grid)


class OneWay(Sound):
    """The prefix sees the patches, but not the other way round."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        p = grid.num_prefix
        patches = super().forward(q[:, :, p:], k[:, :, p:], v[:, :, p:], grid)
        return torch.cat([super().forward(q[:, :, :p], k, v, grid), patches], dim=2)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> None:
        return None

    rank_bound = Attention.rank_bound


class BlindPatch(Sound):
    """The last patch sees no prefix token."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        p = grid.num_prefix
        last = super().forward(q[:, :, -1:], k[:, :, p:], v[:, :, p:], grid)
        return torch.cat([super().forward(q[:, :, :-1], k, v, grid), last], dim=2)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> None:
        return None

    rank_bound = Attention.rank_bound


class ReturnsFloat32(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return super().forward(q, k, v, grid).float()


class DeadParameter(Sound):
    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.unused = nn.Parameter(torch.ones(3))


class DetachesKeys(Sound):
    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().features(q, k.detach())


class Random(Sound):
    """Noise in evaluation, too small for any tolerance."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        out = super().forward(q, k, v, grid)
        return out + 1e-13 * torch.randn_like(out)


class Counts(Sound):
    """A call in evaluation changes the state."""

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        self.calls += 1
        return super().forward(q, k, v, grid)


class KeepsItsShape(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        out = super().forward(q, k, v, grid)
        self.last = out.shape
        return out


class WritesToItsInput(Sound):
    """Doubles the values in the caller's memory, and halves its output."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        out = super().forward(q, k, v, grid)
        with torch.no_grad():
            v.mul_(2)
        return out


class ForgetsItsBuffer(Sound):
    """Random numbers that the state dict does not have."""

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.register_buffer("directions", torch.randn(self.key_dim), persistent=False)

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().features(q * self.directions, k)


class KeepsALambda(Sound):
    """No pickle."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = lambda x: x


class NeedsContiguous(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return super().forward(q, k.view(-1).view(k.shape), v, grid)


class SwallowsNaN(Sound):
    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().features(q, k.nan_to_num())


class RaisesAtNaN(Sound):
    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if bool(k.isnan().any()):
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return super().features(q, k)


class SpreadsNaN(Sound):
    """The mean over the batch counts for nothing, except where it is NaN."""

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().features(q, k + 0 * k.mean(0))


class HidesItsBias(Sound):
    """Takes a bias, undeclared."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, bias: Tensor | None = None) -> Tensor:
        return super().forward(q, k, v, grid)


class NonLinearInValues(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return super().forward(q, k, v.tanh(), grid)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> None:
        return None


class PerChannel(Sound):
    """A gain for each channel, undeclared."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        gain = torch.linspace(1, 2, v.shape[-1], dtype=v.dtype)
        return super().forward(q, k, v * gain, grid)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> None:
        return None


class MixesChannels(PerChannel):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return Sound.forward(self, q, k, v + v.roll(1, -1), grid)


class NotPerChannel(Sound):
    """Declares a matrix per channel where one would do."""

    channelwise = True

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> None:
        return None


class FactorsWithoutChannels(PerChannel):
    """Declares its gains, but returns the factors of one matrix for all channels."""

    channelwise = True

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        return Sound.factors(self, q, k, grid)


class WithItsOwnMatrix(NonLinearInValues):
    """The values' own size weighs them, so the matrix depends on them."""

    linear_in_values = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return Sound.forward(self, q, k, v * v.square().mean(-1, keepdim=True), grid)

    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        left, right = Sound.factors(self, q, k, grid)
        return left @ right.mT * v.square().mean(-1).unsqueeze(-2)


class WithItsOwnWrongMatrix(WithItsOwnMatrix):
    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return super().attention_matrix(q, k, v, grid)[..., 1:]


class WithAnotherMatrix(WithItsOwnMatrix):
    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return 1.001 * super().attention_matrix(q, k, v, grid)


class WrongFactors(Sound):
    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        left, right = super().factors(q, k, grid)
        return left, right * 1.001


class PartsDoNotAddUp(Sound):
    class Half(Sound):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
            return super().forward(q, k, v, grid) / 2

    def matrix_parts(self) -> dict[str, Attention]:
        half = self.Half(self.dim, self.num_heads, self.grid).double()
        half.load_state_dict(self.state_dict())
        return {"half": half, "whole": self}


class RankBoundTooSmall(Sound):
    def rank_bound(self, grid: Grid) -> int:
        return self.key_dim - 1


class RankBoundTooLarge(Sound):
    def rank_bound(self, grid: Grid) -> int:
        return 1000


class OverflowsInHalf(Sound):
    """A cube in the precision of the inputs."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        scale = self.scale.to(q.dtype)
        q, k = (F.relu(q * scale) + 0.1) ** 3, (F.relu(k) + 0.1) ** 3
        left = q / (q @ k.mean(-2).unsqueeze(-1))
        return left @ (k.mT @ v / k.shape[-2])

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> None:
        return None


class DividesByTheSpread(Sound):
    """Without an epsilon, so that tokens that are alike give 0 / 0."""

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().features(q, k / k.std(-2, correction=0, keepdim=True))


class CoarseInBfloat16(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        out = super().forward(q, k, v, grid)
        return (out * 8).round() / 8 if v.dtype == torch.bfloat16 else out


class _CoarseGradient(torch.autograd.Function):
    """The identity, whose gradient in half precision keeps one binary digit."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        if gradient.dtype not in (torch.float16, torch.bfloat16):
            return gradient
        mantissa, power = gradient.frexp()
        return torch.ldexp((2 * mantissa).round() / 2, power)


class CoarseGradientInHalf(Sound):
    """The output is right in every precision; the gradient of the keys is not."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return super().forward(q, _CoarseGradient.apply(k), v, grid)


class CrashesInTheBackwardPass(Sound):
    """Writes over what the backward pass needs."""

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        k = k.exp()
        k += 1
        return F.elu(q * self.scale.to(q.dtype)) + 1, k


class DeclaredSlowerThanItIs(Sound):
    complexity = "O(N^2)"


class Quadratic(Sound):
    """The same function by way of the N x M matrix, still declared O(N)."""

    @full_precision
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        q, k = self.features(q, k)
        weights = q @ k.mT
        return weights / (weights.sum(-1, keepdim=True) + 1e-6) @ v


class QuadraticInAFusedKernel(Quadratic):
    """Torch's fused kernel writes no N x M matrix, but takes its time."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return F.scaled_dot_product_attention(q * self.scale.to(q.dtype), k, v).to(v.dtype)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> None:
        return None

    def rank_bound(self, grid: Grid) -> int:
        return Attention.rank_bound(self, grid)


class BreaksTheGraph(Sound):
    """Python control flow on a number in a tensor."""

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().features(q, k if float(k.sum()) > 0 else k + 0)
