"""Prepares images for a trained network, with the reader, evaluation transform and normalisation of runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from linvit.data.sources.images import Sample
from linvit.data.sources.read import MAX_PIXELS, BadImageError, ImageReader, reason_of
from linvit.data.transforms import classification, segmentation
from linvit.data.transforms.decode import Bands, Kind, orientation_of, to_rgb, upright
from linvit.data.transforms.geometry import CropMode
from linvit.data.transforms.on_device import Normalisation
from linvit.errors import UserError, check_choice, check_number
from linvit.image_size import image_size

ImageLike = str | Path | Image.Image | np.ndarray | Tensor
"""A path; a PIL image; an array (H, W), (H, W, C); a tensor (C, H, W), (H, W). Floats are in [0, 1], or with a
`value_range` as stored."""
HOW_TO_SET = "In Python: linvit.load(RUN, preprocessing={NAME: VALUE}); linvit predict --model RUN: --data.NAME=VALUE"
DEEP = ("I", "F", "I;16", "I;16B", "I;16L")  # modes of PIL with more than 8 bits


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of images in evaluation; names and values are those of the options of data modules."""

    mean: Sequence[float]  # per channel, subtracted from images in [0, 1]
    std: Sequence[float]
    size: Sequence[int] | None = None  # (H, W), bicubic, then a crop; None keeps the aspect ratio
    crop_mode: CropMode = "center"
    crop_pct: float = 1.0  # fraction of the resized side that is kept
    resize_limits: Sequence[int] | None = None  # without size: maximum of the long and of the short side, bilinear
    multiple: int = 1  # without size: sides are then resized to multiples of this
    patch_size: int | None = None  # without size: sides are rounded to multiples of it, bicubic, without a crop
    max_tokens: int | None = None  # with patch_size: largest number of patches, to which larger images are shrunk
    bands: Sequence[int] | None = None  # numbers of the bands to use as channels
    value_range: Sequence[Any] | None = None  # values that become 0 and 1
    exif_orientation: bool = True
    max_pixels: int = MAX_PIXELS

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Preprocessing":
        """Reads a mapping from an untrusted file; raises a `UserError` for an unknown, missing or wrong option."""
        for name in options:
            check_choice("an option of preprocessing", name, [field.name for field in fields(cls)])
        try:
            made = cls(**options)
            _ = made.reader, made.transform, made.normalise
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            reason = str(error).partition("\n")[0].removeprefix("Preprocessing.__init__() ")
            raise UserError(f"these options of preprocessing cannot be used: {reason}") from error
        return made

    @cached_property
    def reader(self) -> ImageReader:
        """Reader of image files."""
        bands = Bands.parse(self.bands, self.value_range)
        return ImageReader(self.max_pixels, self.exif_orientation, bands=bands)

    @cached_property
    def transform(self) -> classification.EvalTransform | classification.NativeTransform | segmentation.EvalTransform:
        """Transform that resizes and crops the image of a sample."""
        check_number("multiple", self.multiple, at_least=1, at_most=4096, whole=True)
        check_choice("crop_mode", self.crop_mode, get_args(CropMode))
        check_number("crop_pct", self.crop_pct, above=0, at_most=1)
        if self.size is None and self.patch_size is not None:
            return classification.NativeTransform(classification.NativeSize(self.patch_size, self.max_tokens))
        if self.size is None:
            limits = None if self.resize_limits is None else (self.resize_limits[0], self.resize_limits[1])
            segmentation.check_resize_limits(limits)
            check_number("the pixels of resize_limits", math.prod(limits or ()), at_most=MAX_PIXELS)
            return segmentation.EvalTransform(limits, self.multiple)
        size = image_size(self.size)
        check_number("the pixels of size over crop_pct", math.prod(size) / self.crop_pct**2, at_most=MAX_PIXELS)
        return classification.EvalTransform(size, self.crop_mode, self.crop_pct)

    @cached_property
    def normalise(self) -> Normalisation:
        """Normalisation of images from 0 to 255."""
        channels = self.reader.bands.channels
        finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if not (finite and len(self.mean) == len(self.std) == channels and min(self.std) > 0):
            raise UserError(f"mean and std need {channels} numbers, std above 0; got {self.mean}, {self.std}")
        return Normalisation(self.mean, self.std)

    def read(self, image: ImageLike, name: str) -> Tensor:
        """Returns an image of any type as if read from a file, (C, H, W), from 0 to 255; raises a `BadImageError`."""
        try:
            if isinstance(image, str | Path):
                return self.reader.read({"bytes": None, "path": str(image)}, name)
            return self._read_values(_values(image, self.exif_orientation))
        except (BadImageError, OSError, ValueError, TypeError, RuntimeError) as error:
            reason = reason_of(error)
            if "--data." in reason:  # an option of a run's data, which does not exist here
                reason = f"{reason.replace('--data.', '')}. {HOW_TO_SET}"
            raise BadImageError(name, reason) from error

    def _read_values(self, values: np.ndarray) -> Tensor:
        bands = self.reader.bands
        if values.ndim != 3 or 0 in values.shape:
            raise ValueError(f"it has the shape {values.shape}; it must be (H, W) or have three dimensions")
        if values.dtype.kind == "f" and bands.ranges is None:
            low, high = float(values.min()), float(values.max())
            if not (low >= 0 and high <= 1):
                raise ValueError(f"its float values are between {low:g} and {high:g}: use [0, 1], or 8 bits")
            values = (values * 255).round().astype(np.uint8)
        count, height, width = values.shape
        self.reader.check(Kind("", width, height, count, str(values.dtype), 1))
        taken = bands.take(values)
        if bands.ranges is None:  # channels last in memory, as a decoded image file
            return torch.from_numpy(np.ascontiguousarray(taken.transpose(1, 2, 0))).permute(2, 0, 1)
        return torch.from_numpy(taken)

    def sample(self, image: ImageLike, name: str) -> Sample:
        """Returns a resized and cropped image, `image` (C, h, w), and `size`, the (H, W) of the original."""
        pixels = self.read(image, name)
        return {"size": tuple(pixels.shape[1:]), **self.transform({"image": pixels}, 0), "id": name}


def _values(image: Any, exif_orientation: bool) -> np.ndarray:
    """Returns the values (bands, H, W) of an image in memory."""
    if isinstance(image, Image.Image):
        image.load()  # reads metadata after the pixels of a PNG, and turns a TIFF
        planes = np.atleast_3d(np.array(image if image.mode in DEEP else to_rgb(image))).transpose(2, 0, 1)
        return upright(planes, orientation_of(image) if exif_orientation else 1)
    if isinstance(image, Tensor):
        values: np.ndarray = image.detach().cpu().float().numpy() if image.is_floating_point() else image.cpu().numpy()
        return values[None] if values.ndim == 2 else values
    if not isinstance(image, np.ndarray):
        raise TypeError(f"it is a {type(image).__name__}, but must be a path, a PIL image, an array or a tensor")
    return image[None] if image.ndim == 2 else np.moveaxis(image, -1, 0)


class EvaluationTransform(v2.Transform):  # type: ignore[misc]  # torchvision has no types
    """Transform of a PIL image, or a tensor (C, H, W) of 8 bits or in [0, 1], to the network's input (C, h, w)."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.preprocessing = preprocessing

    def transform(self, inpt: Any, params: dict[str, Any]) -> Tensor:
        """Applies the preprocessing of evaluation."""
        own = self.preprocessing
        return own.normalise(own.sample(inpt, "given")["image"])

    def extra_repr(self) -> str:
        """Returns the options as text."""
        return repr(self.preprocessing)
