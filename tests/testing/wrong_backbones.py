"""One sound backbone, and one for each way of being wrong that changes a single thing in it."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit import AttentionLayer, Grid, UserError
from linvit.backbones.base import Backbone
from linvit.backbones.initialise import classifier, init_vit
from linvit.backbones.stage import Stage, run_blocks, specs_and_rates, stage_grids
from linvit.image_size import image_size
from linvit.layers.block import Block
from linvit.layers.mlp import Mlp
from linvit.layers.patch_embed import PatchEmbed
from linvit.registry import Spec

DIMS, DEPTHS = (16, 24), (1, 1)


class Sound(Backbone):
    """Two stages at 1/4 and 1/8, with positions: keeps the whole contract."""

    block: type[nn.Module] = Block
    stage: type[nn.Module] = Stage

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | Sequence[int] = 96,
        attention: Spec | Sequence[Spec] = "softmax",
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, DIMS[-1], "avg")
        specs, rates = specs_and_rates(attention, drop_path_rate, DEPTHS)
        self.stages = nn.ModuleList()
        for i, size in enumerate(stage_grids(image_size(img_size), (4, 2))):
            dim, grid = DIMS[i], Grid(size)
            blocks = [
                self.block(dim, AttentionLayer(dim, 2, grid, attention=spec), Mlp(dim, 2 * dim), rate, norm_eps=1e-6)
                for spec, rate in zip(specs[i], rates[i], strict=True)
            ]
            embed = PatchEmbed(in_chans, dim, 2 if i else 4, 2 if i else 4)
            self.stages.append(self.stage(dim, grid, embed, blocks, positions=True))
            in_chans = dim
        self.norm = nn.LayerNorm(DIMS[-1])
        self.head = classifier(DIMS[-1], num_classes)
        self.feature_info = [
            {"module": f"stages.{i}", "num_chs": dim, "reduction": 4 * 2**i} for i, dim in enumerate(DIMS)
        ]
        init_vit(self)

    def no_weight_decay(self) -> set[str]:
        return {"stages.0.pos_embed", "stages.1.pos_embed"}


class Crashes(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raise RuntimeError("out of luck\nand more")


class Exits(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sys.exit(0)


class ExitsWhenPruned(Sound):
    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> Any:
        sys.exit(0)


class Plain(nn.Module):
    """A network as one writes it who has not read the contract."""

    def __init__(self, in_chans: int = 3, num_classes: int = 1000, img_size: Any = 96) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.stem = nn.Conv2d(in_chans, 8, 4, 4)
        self.fc = nn.Linear(8, num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.stem(x).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.forward_features(x))


class PlainWithoutSize(Plain):
    def __init__(self, in_chans: int = 3) -> None:
        super().__init__(in_chans)


class TakesNoImageSize(Sound):
    def __init__(self, in_chans: int = 3, num_classes: int = 1000, drop_path_rate: float = 0.0) -> None:
        super().__init__(in_chans, num_classes, drop_path_rate=drop_path_rate)


class HundredClasses(Sound):
    def __init__(
        self, in_chans: int = 3, num_classes: int = 100, img_size: int = 96, drop_path_rate: float = 0.0
    ) -> None:
        super().__init__(in_chans, num_classes, img_size, drop_path_rate=drop_path_rate)


class LiesAboutFeatures(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head_hidden_size = DIMS[0]


class ReportsOtherClasses(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_classes = 1000


class ForwardIsAnother(Sound):
    def forward(self, x: Tensor) -> Tensor:
        return 1.001 * super().forward(x)


class LiesAboutChannels(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.feature_info[0]["num_chs"] = 24


class LiesAboutReductions(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.feature_info[0]["reduction"] = 2


class CountsFromTheEnd(Sound):
    """Index -1 is the first."""

    def forward_intermediates(self, x: Tensor, indices: Any = None, **options: Any) -> Any:
        return super().forward_intermediates(x, [0] if indices == [-1] else indices, **options)


class PrunesNothing(Sound):
    def prune_intermediate_layers(self, indices: Any = 1, prune_norm: bool = False, prune_head: bool = True) -> Any:
        return list(range(len(self.stages)))[indices:] if isinstance(indices, int) else list(indices)


class PrunesTooMuch(Sound):
    def prune_intermediate_layers(self, indices: Any = 1, prune_norm: bool = False, prune_head: bool = True) -> Any:
        take = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if len(self.stages) == 1:
            self.stages[0].blocks = self.stages[0].blocks[:-1]
        return take


class FixedSizeStage(Stage):
    """Positions that are never interpolated."""

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        x, size = self.embed(x)
        grid = self.grid._replace(size=size)
        return run_blocks(self.blocks, x + self.pos_embed, grid, self.grad_checkpointing and self.training), grid


class FixedSize(Sound):
    stage = FixedSizeStage


class RefusesOthers(Sound):
    """Sides that 8 does not divide are refused, with the size."""

    def forward_levels(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.shape[-2] % 8 or x.shape[-1] % 8:
            raise UserError(f"got an image of {x.shape[-2]}x{x.shape[-1]}; sides must be multiples of 8")
        return super().forward_levels(x, *args, **kwargs)


class RefusesInSilence(RefusesOthers):
    """The same, without the size."""

    def forward_levels(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward_levels(x, *args, **kwargs)
        except UserError as error:
            raise UserError("not this image") from error


class CrashesAtOthers(RefusesOthers):
    def forward_levels(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward_levels(x, *args, **kwargs)
        except UserError as error:
            raise RuntimeError("shape mismatch") from error


class SquareStage(Stage):
    """Recovers the grid by a square root."""

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        tokens, grid = super().forward(x)
        side = int(tokens.shape[1] ** 0.5)
        return tokens, grid._replace(size=(side, side))


class SquareOnly(Sound):
    stage = SquareStage


class SwappedStage(Stage):
    """Height and width exchanged in the grid that leaves the stage."""

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        tokens, grid = super().forward(x)
        return tokens, grid._replace(size=grid.size[::-1])


class Swapped(Sound):
    stage = SwappedStage


class MisplacingStage(Stage):
    """Tokens in the order of columns, said to be in the order of rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        tokens, grid = super().forward(x)
        return grid.plane(tokens).mT.flatten(2).mT, grid


class Misplaces(Sound):
    stage = MisplacingStage


class Symmetric(Sound):
    """A square image and its transpose are one to it."""

    def forward_levels(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward_levels(x + x.mT if x.shape[-1] == x.shape[-2] else x, *args, **kwargs)


class ColourOnly(Sound):
    def __init__(self, in_chans: int = 3, *args: Any, **kwargs: Any) -> None:
        super().__init__(3, *args, **kwargs)


class KeepsItsHead(Sound):
    """Only the number is changed."""

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes


class KeepsItsWeights(Sound):
    """The same number of classes does not give a fresh head."""

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if num_classes != self.num_classes:
            super().reset_classifier(num_classes, global_pool)


class IgnoresAttention(Sound):
    def __init__(
        self, in_chans: int = 3, num_classes: int = 1000, img_size: Any = 96, attention: Any = "softmax", **own: Any
    ) -> None:
        super().__init__(in_chans, num_classes, img_size, **own)


class DropsInEvaluation(Sound):
    def forward_features(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward_features(x), 1e-3)


class Counts(Sound):
    """A call in evaluation changes the state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("calls", torch.zeros(()))

    def forward_levels(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward_levels(*args, **kwargs)


class WritesToItsImages(Sound):
    def forward_levels(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = super().forward_levels(x, *args, **kwargs)
        with torch.no_grad():
            x.mul_(2)
        return out


class BatchCoupled(Sound):
    """Images are scaled by the largest pixel of the batch."""

    def forward_levels(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward_levels(x / x.abs().amax(), *args, **kwargs)


class ForgetsItsBuffer(Sound):
    """Random numbers that the state dict does not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("gains", 1 + 0.1 * torch.randn(DIMS[-1]), persistent=False)

    def pool(self, x: Tensor) -> Tensor:
        return super().pool(x) * self.gains


class KeepsALambda(Sound):
    """No pickle."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = lambda x: x


class DeadParameter(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm.unused = nn.Parameter(torch.ones(3))


class DetachingStage(Stage):
    """No gradient passes to what lies below."""

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        return super().forward(x.detach())


class Detaches(Sound):
    stage = DetachingStage


class CheckpointsNothing(Sound):
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable


class SkipsWhenCheckpointing(Sound):
    """The final norm is forgotten."""

    def forward_features(self, x: Tensor) -> Tensor:
        return self.forward_levels(x)[0] if self.grad_checkpointing else super().forward_features(x)


class DividesWhenCheckpointing(Sound):
    """A gradient that is no number, behind others that are."""

    def forward_features(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward_features(x)
        weight = self.norm.weight
        return found + 0 * (weight - weight.detach()).sqrt().sum() if self.grad_checkpointing else found


class CheckpointsForever(Sound):
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        super().set_grad_checkpointing(True)


class DroppingBlock(Block):
    """Stochastic depth in evaluation, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drop = kwargs.get("drop_path", args[3])

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return x + (1 - self.drop) * (super().forward(x, grid) - x)


class DropsAlways(Sound):
    block = DroppingBlock


class IgnoresDropPath(Sound):
    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: Any = 96,
        attention: Any = "softmax",
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(in_chans, num_classes, img_size, attention)


class NeedsTwoImages(Sound):
    def forward_levels(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.training and len(x) == 1:
            raise ValueError("expected more than 1 value per channel")
        return super().forward_levels(x, *args, **kwargs)


class SparesWhatIsNotThere(Sound):
    def no_weight_decay(self) -> set[str]:
        return {"pos_embed"}


class FirstStageUngrouped(Sound):
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^stages\.0\.embed", "blocks": [(r"^stages\.1\.blocks\.(\d+)", None), (r"^norm", (99999,))]}


class OneGroup(Sound):
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"all": r"^stages|norm|head"}


class ReturnsFloat32(Sound):
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return super().forward_head(x, pre_logits).float()


class Cancels(Sound):
    """Adds a large number and takes it away: float32 has no digits left."""

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return super().forward_head(x, pre_logits) + 3e4 - 3e4


class OverflowsInHalf(Sound):
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return super().forward_head(x, pre_logits) * 2**20 / 2**20


class BreaksUnderAutocast(Sound):
    def forward_features(self, x: Tensor) -> Tensor:
        return super().forward_features(x) / (0 if torch.is_autocast_enabled("cpu") else 1)


class PlainTensor(Sound):
    """Neither parameter nor buffer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mean = [torch.zeros(())]


class InsistsOnTheProcessor(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("mean", torch.zeros((), device="cpu"))


class BreaksTheGraph(Sound):
    """Python control flow on a number in a tensor."""

    def forward_levels(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward_levels(x if float(x.sum()) > 0 else x + 0, *args, **kwargs)


class Optional(Sound):
    """Wrong on demand."""

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: Any = 96,
        attention: Any = "softmax",
        drop_path_rate: float = 0.0,
        unused: bool = False,
    ) -> None:
        super().__init__(in_chans, num_classes, img_size, attention, drop_path_rate)
        if unused:
            self.norm.unused = nn.Parameter(torch.ones(3))
