"""A head under test in a network, on a small backbone that any image goes through."""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.heads.detection.base import DetectionHead, Target
from linvit.heads.detection.detector import Detector
from linvit.heads.segmentation.base import SegmentationHead
from linvit.heads.segmentation.segmentor import Segmentor
from linvit.registry import Spec, heads
from linvit.testing.backbone.images import CLASSES, BackboneSubject, images
from linvit.testing.numbers import gradients_of, normal, trainable
from linvit.testing.report import require
from linvit.testing.subject import Given, Size

CHANNELS = (16, 24, 32, 40)
REDUCTIONS = (4, 8, 16, 32)
TRIES = 8


class HeadSubject(BackboneSubject):
    """A head of semantic segmentation under test; what it builds is a network of a small backbone and the head."""

    arguments: ClassVar = {
        "channels": "of the feature maps",
        "reductions": "of the feature maps",
        "num_classes": "classes",
    }
    supplied: ClassVar = ("channels", "reductions", "num_classes")
    defaults: ClassVar = {}
    attributes: ClassVar = {"num_classes": "classes", "reductions": "of the feature maps"}
    methods: ClassVar = {
        "levels": "which feature maps it takes",
        "classifiers": "the layers whose shape depends on the classes",
    }
    base = "linvit.SegmentationHead"
    kind: ClassVar[type[nn.Module]] = SegmentationHead

    def __init__(self, spec: Spec | Callable[..., nn.Module], img_size: int | Sequence[int], quick: bool) -> None:
        super().__init__(spec, None, img_size, quick, heads)
        self.exported_sizes = self.exported_sizes[:1]

    def create(
        self,
        size: Size | None = None,
        *,
        num_classes: int = CLASSES,
        channels: Sequence[int] = CHANNELS,
        reductions: Sequence[int] = REDUCTIONS,
        **context: Any,
    ) -> Any:
        """Builds the small backbone and a head on it, with initial values."""
        levels: Any = self.constructor
        chosen = levels.levels(reductions)
        context |= {
            "channels": [channels[i] for i in chosen],
            "reductions": [reductions[i] for i in chosen],
            "num_classes": num_classes,
        }
        if self.takes("img_size"):
            context["img_size"] = size or self.size
        head = self.construct(**context)
        backbone = Means(channels, reductions)
        return Detector(backbone, head) if isinstance(head, DetectionHead) else Segmentor(backbone, head)

    def part(self, model: Any) -> Any:
        """Returns the head of a network."""
        return model.head

    def check_kind(self, part: Any) -> None:
        """Ends the clause if a head is for another task, or forgets its classes."""
        hint = "; its kind is 'detection_head'" if isinstance(part, DetectionHead) else ""
        another = f"it builds a {type(part).__name__}, which is not a {self.base}{hint}"
        require(isinstance(part, self.kind), another)
        classes = part.num_classes
        require(classes == CLASSES, f"the attribute num_classes is {classes} after num_classes={CLASSES}")

    def maps(self, size: Size | None = None) -> list[Tensor]:
        """Returns the feature maps of two images that the head gets, in float64 and without gradients."""
        backbone, indices = self.model.backbone, self.model.pyramid.indices
        features = backbone.forward_intermediates(images(size or self.size), indices=indices)
        return [feature.detach() for feature in features]

    def gradients(self) -> Iterator[tuple[dict[str, Tensor | None], Set[str]]]:
        """Yields those of maps and parameters, tried with other parameters as well: a few ReLUs may all be off."""
        training = {f"{name} in training": gradient for name, gradient in self._gradients(True, 0).items()}
        for seed in range(TRIES):
            yield training | self._gradients(False, seed), training.keys()

    def _gradients(self, training: bool, seed: int) -> dict[str, Tensor | None]:
        head = self.build(seed=seed).head.train(training)
        maps = [feature.requires_grad_() for feature in self.maps()]
        logits, others = head.with_auxiliary(maps)
        return gradients_of([logits, *others], {f"map {i}": x for i, x in enumerate(maps)} | trainable(head))


class Batch(Given):
    """Two images of different sizes and their targets: four boxes in the first, none in the second."""

    def __init__(self, targets: list[Target], **images: Tensor) -> None:
        super().__init__(**images)
        self.targets = targets

    @property
    def images(self) -> list[Tensor]:
        """The images."""
        return list(self.named.values())

    def __call__(self, model: Callable[..., Any]) -> Any:
        """Returns the losses in training, else the detections."""
        return model(self.images, self.targets) if getattr(model, "training", False) else model(self.images)


class DetectionSubject(HeadSubject):
    """A head of detection under test."""

    base = "linvit.DetectionHead"
    kind = DetectionHead

    def build(
        self, size: Any = None, dtype: torch.dtype = torch.float64, seed: int = 0, finds: bool = True, **context: Any
    ) -> Any:
        """Builds the network, by default with biases of 0 in its classifiers, so that it finds something."""
        model = super().build(size, dtype, seed, **context)
        for layer in model.head.classifiers() if finds else ():
            if isinstance(bias := getattr(layer, "bias", None), Tensor):
                bias.data.zero_()
        return model

    def inputs(self, model: Any = None, size: Any = None, batch: int = 2) -> Any:
        """Returns two images and their targets."""
        height, width = self.size
        first, second = normal(3, height, width, seed=1), normal(3, max(1, height - 5), width + 7, seed=2)
        boxes = torch.tensor([[0.1, 0.1, 0.5, 0.6], [0.4, 0.3, 0.9, 0.8], [0.0, 0.0, 1.0, 1.0], [0.7, 0.1, 0.95, 0.4]])
        boxes = boxes * torch.tensor([width, height] * 2)
        return Batch([target_of(first, boxes), target_of(second, boxes[:0])], first=first, second=second)

    def gradients(self) -> Iterator[tuple[dict[str, Tensor | None], Set[str]]]:
        """Yields those of maps and parameters in training; the latter may be 0, where no box is for a level."""
        model = self.build().train()
        maps: list[Tensor] = []
        hook = model.head.register_forward_pre_hook(lambda _, inputs: maps.extend(inputs[0]))
        total = sum(self.inputs()(model).values(), torch.zeros(()))
        hook.remove()
        parameters = trainable(model.head)
        yield gradients_of(total, {f"map {i}": x for i, x in enumerate(maps)} | parameters), parameters.keys()


def target_of(image: Tensor, boxes: Tensor) -> Target:
    """Returns a target of an image, with masks that fill the boxes."""
    masks = torch.zeros(len(boxes), *image.shape[-2:], dtype=torch.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
        mask[max(0, y1) : max(0, y2), max(0, x1) : max(0, x2)] = 1
    return {"boxes": boxes, "labels": torch.arange(len(boxes)) % CLASSES, "masks": masks}


class Means(nn.Module):
    """A backbone of one layer per map: means of pixels, a 1 x 1 convolution and GELU."""

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
