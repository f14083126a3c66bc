"""One sound backbone, and one for each way of being wrong that changes a single thing in it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linvit import AttentionLayer, Grid
from linvit.backbones.base import Backbone
from linvit.backbones.initialise import classifier, init_vit
from linvit.backbones.stage import Stage, run_blocks, specs_and_rates, stage_grids
from linvit.image_size import image_size
from linvit.layers.block import Block
from linvit.layers.mlp import Mlp
from linvit.layers.patch_embed import PatchEmbed
from linvit.registry import Spec
from tests.testing.helpers import changed, name_classes, refuse

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


def with_images(change: Callable[[Tensor], Tensor]) -> Any:
    """One that does something to its images first."""
    return changed(
        Sound, forward_levels=lambda self, x, *args, **own: Sound.forward_levels(self, change(x), *args, **own)
    )


def with_stages(change: Callable[[Tensor, Grid], tuple[Tensor, Grid]]) -> Any:
    """One with other tokens, or another grid, behind each stage."""
    return changed(Sound, stage=changed(Stage, forward=lambda self, x: change(*Stage.forward(self, x))))


def with_head(change: Callable[[Tensor], Tensor]) -> Any:
    """One that does something to its logits or pooled features."""
    return changed(
        Sound, forward_head=lambda self, x, pre_logits=False: change(Sound.forward_head(self, x, pre_logits))
    )


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


class HundredClasses(Sound):
    def __init__(
        self, in_chans: int = 3, num_classes: int = 100, img_size: int = 96, drop_path_rate: float = 0.0
    ) -> None:
        super().__init__(in_chans, num_classes, img_size, drop_path_rate=drop_path_rate)


class Optional(Sound):
    """Wrong on demand."""

    def __init__(self, *args: Any, unused: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if unused:
            self.norm.unused = nn.Parameter(torch.ones(3))


class LiesAboutChannels(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.feature_info[0]["num_chs"] = 24


class FixedSizeStage(Stage):
    """Positions that are never interpolated."""

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        x, size = self.embed(x)
        grid = self.grid._replace(size=size)
        return run_blocks(self.blocks, x + self.pos_embed, grid, self.grad_checkpointing and self.training), grid


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


class DroppingBlock(Block):
    """Stochastic depth in evaluation, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drop = kwargs.get("drop_path", args[3])

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return x + (1 - self.drop) * (super().forward(x, grid) - x)


class PlainTensor(Sound):
    """Neither parameter nor buffer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mean = [torch.zeros(())]


class InsistsOnTheProcessor(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("mean", torch.zeros((), device="cpu"))


def divided_by_8(x: Tensor) -> Tensor:
    """Refuses images with other sides, and names the size."""
    if x.shape[-2] % 8 or x.shape[-1] % 8:
        refuse(f"got an image of {x.shape[-2]}x{x.shape[-1]}; sides must be multiples of 8")
    return x


ForwardIsAnother = changed(Sound, forward=lambda self, x: 1.001 * Sound.forward(self, x))
CountsFromTheEnd = changed(
    Sound,
    forward_intermediates=lambda self, x, indices=None, **own: Sound.forward_intermediates(
        self, x, [0] if indices == [-1] else indices, **own
    ),
)
PrunesNothing = changed(Sound, prune_intermediate_layers=lambda self, indices, *args, **own: indices)
FixedSize = changed(Sound, stage=FixedSizeStage)
RefusesOthers = with_images(divided_by_8)
RefusesInSilence = with_images(lambda x: x if x.shape[-1] % 8 == 0 else refuse("not this image"))
Swapped = with_stages(lambda x, grid: (x, grid._replace(size=grid.size[::-1])))
Misplaces = with_stages(lambda x, grid: (grid.plane(x).mT.flatten(2).mT, grid))  # in the order of columns
Symmetric = with_images(lambda x: x + x.mT if x.shape[-1] == x.shape[-2] else x)
CheckpointsNothing = changed(Sound, set_grad_checkpointing=lambda self, enable=True: None)
CheckpointsForever = changed(Sound, set_grad_checkpointing=lambda self, enable=True: Sound.set_grad_checkpointing(self))
SkipsWhenCheckpointing = changed(  # the final norm
    Sound,
    forward_features=lambda self, x: (
        self.forward_levels(x)[0] if self.stages[0].grad_checkpointing else Sound.forward_features(self, x)
    ),
)
DropsAlways = changed(Sound, block=DroppingBlock)
IgnoresDropPath = changed(
    Sound, __init__=lambda self, *args, drop_path_rate=0.0, **own: Sound.__init__(self, *args, **own)
)
SparesWhatIsNotThere = changed(Sound, no_weight_decay=lambda self: {"pos_embed"})
FirstStageUngrouped = changed(
    Sound,
    group_matcher=lambda self, coarse=False: {
        "stem": r"^stages\.0\.embed",
        "blocks": [(r"^stages\.1\.blocks\.(\d+)", None), (r"^norm", (99999,))],
    },
)
ReturnsFloat32 = with_head(lambda x: x.float())
Cancels = with_head(lambda x: x + 3e4 - 3e4)
BreaksUnderAutocast = with_head(lambda x: x / (0 if torch.is_autocast_enabled("cpu") else 1))

name_classes(vars())
