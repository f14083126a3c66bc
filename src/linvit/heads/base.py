"""Base class of the heads of all tasks: the feature maps that a head accepts, and its task."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from linvit.errors import UserError, check_number


class Head(nn.Module):
    """Base class of modules that map the feature maps of a backbone to a prediction; one subclass per task.

    Args:
        channels: Channels of each feature map, the finest map first.
        reductions: Image side over map side of each map, in ascending order.
        num_classes: Classes K.

    Attributes:
        task: Task of the head, "segmentation" or "detection".
        maker: Function that creates a network with a head of this task, for messages.
        needs_pyramid: True if it needs maps of several sizes. Those of a plain transformer, which have one size, then
            become a pyramid (`linvit.heads.neck`).
        plain_maps: Number of blocks of a plain transformer to use for this: 1 is the last, more are evenly spaced.
        fpn_width: Option with the channels of its feature pyramid network; empty without one. A head with this option
            accepts `fpn: false`, for a plain transformer, whose maps already have that width.
        keeps_classifiers: True if classifiers that do not fit a checkpoint of other classes keep their initial
            values instead of zeros.

    Raises:
        UserError: If there is no map, or if channels, reductions or classes are not positive or not in order.
    """

    task: ClassVar[str]
    maker: ClassVar[str]
    needs_pyramid: ClassVar[bool] = True
    plain_maps: ClassVar[int] = 1
    fpn_width: ClassVar[str] = ""
    keeps_classifiers: ClassVar[bool] = False

    def __init__(self, channels: Sequence[int], reductions: Sequence[int], num_classes: int) -> None:
        super().__init__()
        for name, values in (("channels", channels), ("reductions", reductions)):
            for value in values:
                check_number(f"an entry of {name} {list(values)}", value, at_least=1, whole=True)
        check_number("num_classes", num_classes, at_least=1, whole=True)
        if not channels or len(channels) != len(reductions) or list(reductions) != sorted(reductions):
            raise UserError(
                f"a head takes one number of channels and one reduction per feature map, the finest map first; got "
                f"channels {list(channels)} and reductions {list(reductions)}"
            )
        self.channels = tuple(channels)
        self.reductions = tuple(reductions)
        self.num_classes = num_classes

    @classmethod
    def levels(cls, reductions: Sequence[int]) -> list[int]:
        """Returns the positions, among all feature maps of a backbone, of those that a network passes to this head.

        By default those at a reduction of 4 or more.
        """
        return [i for i, reduction in enumerate(reductions) if reduction >= 4]

    def check_pyramid(self, levels: int = 2, finest: int = 4, doubling: bool = False) -> None:
        """Raises a `UserError` unless the maps are a pyramid, each coarser than the previous one.

        It has `levels` maps or more, the first of a reduction of `finest` at most. With `doubling` each reduction is
        twice the previous one.
        """
        steps = list(zip(self.reductions, self.reductions[1:], strict=False))
        fits = all(2 * fine == coarse if doubling else fine < coarse for fine, coarse in steps)
        if len(self.reductions) >= levels and self.reductions[0] <= finest and fits:
            return
        each = "at twice the reduction of" if doubling else "coarser than"
        maps = "a feature map" if levels == 1 else f"{levels} feature maps"
        other = ", or the head fcn, which reads a single map" if self.task == "segmentation" else ""
        raise UserError(
            f"{type(self).__name__} needs {maps} or more, the first at a reduction of {finest} or less, each {each} "
            f"the one before; got reductions {list(self.reductions)}. Use a pyramid, such as swin_tiny or "
            f"{{name: timm, model: resnet50}}{other}"
        )

    @classmethod
    def classes_in(cls, state: Mapping[str, Tensor]) -> int:
        """Returns the number of classes of a state dict of such a head; 0 if it has no classifier."""
        return rows(state, "classifier.weight")

    def classifiers(self) -> list[nn.Module]:
        """Returns all layers whose size depends on the number of classes."""
        raise NotImplementedError(f"{type(self).__name__} has no classifiers")


def rows(state: Mapping[str, Tensor], name: str) -> int:
    """Returns the length of a tensor of a state dict; 0 if it does not exist."""
    return len(state[name]) if name in state and state[name].ndim else 0
