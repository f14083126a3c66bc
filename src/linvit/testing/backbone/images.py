"""A backbone under test and its images, all of it reproducible."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.registry import Spec, backbones
from linvit.signatures import parameters_of, takes
from linvit.testing.attention.inputs import disturb, normal

CLASSES = 7
Size = tuple[int, int]


def images(
    size: Size, *, batch: int = 2, in_chans: int = 3, dtype: torch.dtype = torch.float64, seed: int = 1
) -> Tensor:
    """Returns random images (B, in_chans, H, W)."""
    return normal(batch, in_chans, *size, seed=seed).to(dtype)


class Subject:
    """A backbone under test, of which it builds instances with changed initial values.

    Args:
        spec: A name, a mapping with `name` and options, or a callable that builds the backbone.
        attention: Spec or specs of the backbone's attention; None leaves its own.
        img_size: Side, or (H, W), of most instances and images.
        quick: Whether checks leave out their largest sizes.

    Attributes:
        size: Of the instances and images, (H, W).
        constructor: The class or function that builds it.
        parameters: Names and defaults of its arguments.

    Raises:
        UserError: If there is no such backbone, or it takes no attention and is given one.
    """

    def __init__(
        self,
        spec: Spec | Callable[..., nn.Module],
        attention: Spec | Sequence[Spec] | None,
        img_size: int | Sequence[int],
        quick: bool,
    ) -> None:
        self.spec = spec
        self.size = image_size(img_size)
        self.quick = quick
        self.constructor: Callable[..., Any]
        self._create: Callable[..., Any]
        self._options: dict[str, Any]
        if callable(spec):
            name, self._options = str(self), {}
            self.constructor = self._create = spec
        else:
            name, self._options = backbones.parse(spec)
            self.constructor = backbones.get(name)
            self._create = functools.partial(backbones.create, name)
        self.parameters = parameters_of(self.constructor)
        if attention is not None:
            if not self.takes("attention"):
                raise UserError(f"backbone '{name}' takes no attention, it has its own; leave --attention out")
            self._options["attention"] = attention

    def __str__(self) -> str:
        if isinstance(self.spec, str):
            return self.spec
        if isinstance(self.spec, Mapping):
            return ", ".join(str(value) if key == "name" else f"{key}={value}" for key, value in self.spec.items())
        built = self.spec.func if isinstance(self.spec, functools.partial) else self.spec
        return f"{built.__module__}:{built.__qualname__}"

    def takes(self, option: str) -> bool:
        """Returns whether the constructor has a parameter of this name, or `**kwargs` that may be anything."""
        return takes(self.constructor, option)

    @property
    def wide(self) -> Size:
        """Returns a size that is twice as wide as high."""
        return self.size[0], 2 * self.size[0]

    @property
    def own_size(self) -> Size:
        """Returns the default image size of the constructor."""
        size = self._options.get("img_size", self.parameters.get("img_size"))
        return self.size if size is inspect.Parameter.empty or size is None else image_size(size)

    @functools.cached_property
    def model(self) -> Any:
        """Returns the instance in float64 that all checks share and leave as it is."""
        return self.build()

    @functools.cached_property
    def given(self) -> Tensor:
        """Returns two images in float64 for it, (2, 3, H, W)."""
        return images(self.size)

    def create(self, size: Size | None = None, **context: Any) -> Any:
        """Builds an instance with its initial values; it has no type, since timm's contract has no class."""
        height, width = size or self.size
        side = height if height == width else [height, width]
        return self._create(**{"num_classes": CLASSES, **self._options, "img_size": side, **context})

    def build(self, size: Size | None = None, dtype: torch.dtype = torch.float64, seed: int = 0, **context: Any) -> Any:
        """Builds an instance in evaluation mode with changed initial values. A seed gives the same parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built = self.create(size, **context)
        disturb(built)
        built.to(dtype).eval()
        settle(built, images(size or self.size, in_chans=context.get("in_chans", 3), dtype=dtype))
        return built


@torch.no_grad()
def settle(model: nn.Module, x: Tensor) -> None:
    """Gives each BatchNorm the statistics of images, as training does; with those it begins with, biases drown them."""
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


def sized(size: Size) -> str:
    """Writes a size as "64x96"."""
    return f"{size[0]}x{size[1]}"
