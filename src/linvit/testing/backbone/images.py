"""A backbone under test and its images."""

import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.registry import Spec, backbones
from linvit.testing.numbers import gradients_of, normal, trainable
from linvit.testing.subject import Given, Size, Subject

CLASSES = 7
NEIGHBOURS = (1.0, 2.0**-4, 2.0**4)  # scales of the images of a batch


def images(
    size: Size, *, batch: int = 2, in_chans: int = 3, dtype: torch.dtype = torch.float64, seed: int = 1
) -> Tensor:
    """Returns random images (B, in_chans, H, W)."""
    return normal(batch, in_chans, *size, seed=seed).to(dtype)


class BackboneSubject(Subject):
    """Backbone under test; `attention` is the option of its constructor, None keeps its default."""

    arguments: ClassVar = {
        "in_chans": "channels of the images",
        "num_classes": "classes",
        "img_size": "side or (H, W) of the images",
        "drop_path_rate": "stochastic depth",
    }
    supplied: ClassVar[tuple[str, ...]] = ("num_classes", "img_size")
    defaults: ClassVar = {"in_chans": 3, "num_classes": 1000, "drop_path_rate": 0.0}
    attributes: ClassVar = {
        "num_classes": "classes",
        "num_features": "channels of the last feature",
        "head_hidden_size": "channels of the pooled feature",
        "feature_info": "module, channels and reduction of each feature",
    }
    methods: ClassVar = {  # timm's; `no_weight_decay()`, the names of parameters without weight decay, is optional
        "forward_features": "images to the last feature",
        "forward_head": "the last feature to logits",
        "forward_intermediates": "features of chosen levels",
        "prune_intermediate_layers": "drops modules that chosen features do not need",
        "get_classifier": "the classifier",
        "reset_classifier": "replaces the classifier",
        "set_grad_checkpointing": "recomputes activations in the backward pass",
        "group_matcher": "layer groups for layer-wise learning rates",
    }
    base = "linvit.Backbone"

    def __init__(
        self,
        spec: Spec | Callable[..., nn.Module],
        attention: Spec | Sequence[Spec] | None,
        img_size: int | Sequence[int],
        quick: bool,
    ) -> None:
        super().__init__(spec, backbones, quick)
        self.size = image_size(img_size)
        height = self.size[0]
        self.compilations = (
            ("inductor", (self.size,), False),
            ("aot_eager", (self.size,), True),
            ("aot_eager", (self.size, self.wide), False),  # torch cannot trace antialiased gradients
        )
        self.exported_sizes = ((2, self.size), (3, self.wide), (1, (2 * height, 3 * height)))
        if attention is not None:
            if not self.takes("attention"):
                name = str(self).partition(",")[0]
                raise UserError(f"backbone '{name}' has no option attention; remove --attention")
            self.options["attention"] = attention

    @property
    def wide(self) -> Size:
        """Returns a size that is twice as wide as high."""
        return self.size[0], 2 * self.size[0]

    @property
    def own_size(self) -> Size:
        """Returns the default image size of the constructor."""
        size = self.options.get("img_size", self.parameters.get("img_size"))
        return self.size if size is inspect.Parameter.empty or size is None else image_size(size)

    @property
    def given(self) -> Tensor:
        """Returns two images in float64, (2, 3, H, W)."""
        return images(self.size)

    def create(self, size: Size | None = None, **context: Any) -> Any:
        """Builds an instance with its initial values; untyped, since timm's contract has no class."""
        height, width = size or self.size
        side = height if height == width else [height, width]
        classes = self.options.get("num_classes", CLASSES)
        return self.construct(**{"num_classes": classes, "img_size": side, **context})

    def build(self, size: Size | None = None, dtype: torch.dtype = torch.float64, seed: int = 0, **context: Any) -> Any:
        """Builds an instance in evaluation mode with changed initial values and the statistics of images."""
        built = super().build(size, dtype, seed, **context)
        update_batch_norms(built, images(size or self.size, in_chans=context.get("in_chans", 3), dtype=dtype))
        return built

    def inputs(self, model: Any, size: Size | None = None, batch: int = 2) -> Given:
        """Returns random images in float64."""
        return Given(images=images(size or self.size, batch=batch))

    def neighbours(self, model: Any) -> Given:
        """Returns images of different scales."""
        scales = torch.tensor(NEIGHBOURS, dtype=torch.float64).view(-1, 1, 1, 1)
        return Given(images=images(self.size, batch=len(scales)) * scales)

    def gradients(self) -> Iterator[tuple[dict[str, Tensor | None], Set[str]]]:
        """Yields gradients of the logits, and of the features, as a class token ignores the last block's patches."""
        model = self.build().train()
        for run in (model, model.forward_features):
            x = self.given.requires_grad_()
            yield gradients_of(run(x), {"images": x, **trainable(model)}), set()


@torch.no_grad()
def update_batch_norms(model: nn.Module, x: Tensor) -> None:
    """Sets the statistics of each BatchNorm from images, as training does; with the initial ones biases dominate."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    if norms:
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.train().momentum = 1.0
        model(x)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.eval().momentum = momentum


def pyramid(model: Any, x: Tensor, **options: Any) -> list[Tensor]:
    """Returns all features (B, C, H', W') of a backbone, without the final one."""
    features: list[Tensor] = model.forward_intermediates(x, intermediates_only=True, **options)
    return features
