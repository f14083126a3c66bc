"""A head under test in a network, on a small backbone that any image goes through."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from linvit.heads.detection.base import DetectionHead
from linvit.heads.detection.detector import Detector
from linvit.heads.segmentation.segmentor import Segmentor
from linvit.image_size import image_size
from linvit.registry import Spec, heads
from linvit.signatures import takes
from linvit.testing.backbone.images import CLASSES, Size, Subject, images

CHANNELS = (16, 24, 32, 40)
REDUCTIONS = (4, 8, 16, 32)


class HeadSubject(Subject):
    """A head under test: its `model` is a network of a small backbone and the head, a `Segmentor` or a `Detector`.

    Args:
        spec: A name, a mapping with `name` and options, or the class itself.
        img_size: Side, or (H, W), of most images.
        quick: Whether checks leave out their slowest parts.
    """

    def __init__(self, spec: Spec | Callable[..., nn.Module], img_size: int | Sequence[int], quick: bool) -> None:
        self.head = spec
        super().__init__(functools.partial(network, spec), None, img_size, quick)

    def __str__(self) -> str:
        if isinstance(self.head, Mapping):
            return ", ".join(f"{value}" if key == "name" else f"{key}={value}" for key, value in self.head.items())
        return self.head if isinstance(self.head, str) else f"{self.head.__module__}:{self.head.__qualname__}"

    def maps(self, size: Size | None = None) -> list[Tensor]:
        """Returns the feature maps of two images that the head gets, in float64 and without gradients."""
        backbone, indices = self.model.backbone, self.model.pyramid.indices
        features = backbone.forward_intermediates(images(size or self.size), indices=indices)
        return [feature.detach() for feature in features]


def network(
    head: Spec | Callable[..., nn.Module],
    num_classes: int = CLASSES,
    img_size: int | Sequence[int] = 64,
    channels: Sequence[int] = CHANNELS,
    reductions: Sequence[int] = REDUCTIONS,
) -> Segmentor | Detector:
    """Builds the small backbone and a head on it."""
    backbone = Means(channels, reductions)
    constructor: Any = head if callable(head) else heads.get(heads.parse(head)[0])
    chosen = constructor.levels(reductions)
    context = {
        "channels": [channels[i] for i in chosen],
        "reductions": [reductions[i] for i in chosen],
        "num_classes": num_classes,
    }
    if takes(constructor, "img_size"):
        context["img_size"] = image_size(img_size)
    made: Any = head(**context) if callable(head) else heads.create(head, **context)
    return Detector(backbone, made) if isinstance(made, DetectionHead) else Segmentor(backbone, made)


class Means(nn.Module):
    """A backbone of one layer per map: means of squares of pixels, a 1 x 1 convolution and GELU."""

    def __init__(self, channels: Sequence[int], reductions: Sequence[int]) -> None:
        super().__init__()
        pairs = list(zip(channels, reductions, strict=True))
        self.feature_info = [{"module": f"convs.{i}", "num_chs": c, "reduction": r} for i, (c, r) in enumerate(pairs)]
        self.convs = nn.ModuleList(nn.Conv2d(3, out, 1) for out in channels)
        self.reductions = tuple(reductions)

    def forward_intermediates(self, x: Tensor, indices: Sequence[int], **_: Any) -> list[Tensor]:
        """Images (B, 3, H, W) to maps (B, C_i, H / r_i, W / r_i), sides rounded up."""
        size = x.shape[-2:]
        sizes = [[-(-side // self.reductions[i]) for side in size] for i in indices]
        means = [F.adaptive_avg_pool2d(x, (height, width)) for height, width in sizes]
        return [F.gelu(self.convs[i](mean)) for i, mean in zip(indices, means, strict=True)]
