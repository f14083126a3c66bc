"""What a network says of one image: the base of the tasks' own classes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from linvit.callbacks.common import rgb
from linvit.callbacks.dense import PicturePaths
from linvit.errors import UserError


@dataclass(kw_only=True)
class Result:
    """A prediction for an image; a task's own class adds what it predicts, and `plot` and `save`.

    Attributes:
        class_names: Of all classes.
        source: The image as it was given: a path, or a picture, array or tensor.
        name: What messages and files call it: its path, or its number.
        read: Reads the source: an image (C, H, W) from 0 to 255.
    """

    class_names: list[str] = field(default_factory=list, repr=False)
    source: Any = field(default=None, repr=False)
    name: str = ""
    read: Callable[[], Tensor] | None = field(default=None, repr=False)

    @property
    def image(self) -> Image.Image:
        """The original image as RGB, which is read again; of several bands the first three."""
        if self.read is None:
            raise UserError(f"the image {self.name!r} is not known any more")
        pixels = rgb(self.read().float()).round().clamp(0, 255).to(torch.uint8)
        return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())

    def plot(self) -> Image.Image:
        """The image with the prediction."""
        return self.image

    def save(self, path: str | Path) -> Path:
        """Writes the prediction to a file; returns its path."""
        raise UserError(f"{type(self).__name__} cannot be saved: its class needs a method `save`")

    @classmethod
    def save_all(cls, results: Iterable[Any], folder: Path, source: str | None = None) -> Path:
        """Writes the predictions for the images of a source, one after another; returns where they are."""
        paths = PicturePaths(folder, source)
        for each in results:
            each.save(paths(each.name))
        return paths.folder


LINE = 14  # pixels


def with_lines(picture: Image.Image, lines: Sequence[str]) -> Image.Image:
    """A picture, small ones enlarged, with lines of text below."""
    font = ImageFont.load_default(12)
    width = max(picture.width, 160, *(int(font.getlength(line)) + 8 for line in lines))
    height = round(picture.height * width / picture.width)
    page = Image.new("RGB", (width, height + LINE * len(lines) + 6), "white")
    page.paste(picture.resize((width, height)))
    for i, line in enumerate(lines):
        ImageDraw.Draw(page).text((4, height + 2 + LINE * i), line, "black", font)
    return page
