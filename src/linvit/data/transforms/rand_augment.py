"""RandAugment (Cubuk et al. 2020) as timm draws it: lists of operations for one sample."""

import re
from dataclasses import dataclass

import numpy as np

from linvit.data.transforms.geometry import Fill, PixelOp, Warp, affine_matrix
from linvit.data.transforms.on_device import ImageOp
from linvit.errors import UserError

EXAMPLE = "rand-m9-mstd0.5-inc1"
OPERATIONS = (
    *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add"),
    *("color", "contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)


@dataclass(frozen=True)
class RandAugment:
    """Draws some of 15 operations with replacement, each to be done with a probability and a noisy magnitude."""

    magnitude: float = 10  # of every operation (m)
    layers: int = 2  # operations drawn per image (n)
    deviation: float = 0  # of the magnitude, standard (mstd); above 100 the magnitude is uniform from 0 to m
    increasing: bool = False  # more magnitude is always more change (inc)
    largest: float = 10  # bound of the magnitude (mmax)
    probability: float = 0.5  # of doing a drawn operation (p)

    @classmethod
    def parse(cls, text: str) -> "RandAugment":
        """Reads timm's notation, such as rand-m9-mstd0.5-inc1."""
        kind, *parts = text.split("-")
        names = {"m": "magnitude", "n": "layers", "mstd": "deviation", "mmax": "largest", "p": "probability"}
        options: dict[str, float] = {}
        for part in parts:
            found = re.fullmatch(r"(inc|[mnp]|mstd|mmax)(\d+(?:\.\d+)?)", part)
            if found is None:
                raise _unknown(text, part)
            options[names.get(found[1], "increasing")] = float(found[2])
        if kind != "rand":
            raise _unknown(text, kind)
        layers, increasing = int(options.pop("layers", 2)), bool(options.pop("increasing", 0))
        augment = cls(layers=layers, increasing=increasing, **options)
        if augment.layers < 1 or not 0 <= augment.probability <= 1 or not 0 < augment.largest <= 10:
            raise UserError(f"auto_augment '{text}': n must be at least 1, p in [0, 1], mmax in (0, 10]")
        return augment

    def draw(self, rng: np.random.Generator) -> list[tuple[str, float]]:
        """Draws names and amounts of the operations for one image; see `amount`."""
        drawn = []
        for index in rng.integers(len(OPERATIONS), size=self.layers):
            if rng.random() >= self.probability:
                continue
            magnitude = self.magnitude
            if self.deviation > 100:
                magnitude = rng.uniform(0, magnitude)
            elif self.deviation:
                magnitude = rng.normal(magnitude, self.deviation)
            level = min(max(magnitude, 0), self.largest) / 10
            drawn.append((OPERATIONS[index], self.amount(OPERATIONS[index], level, rng)))
        return drawn

    def amount(self, name: str, level: float, rng: np.random.Generator) -> float:
        """Translates a level from 0 to 1 into the amount of an operation.

        It is degrees (rotate), pixels per pixel (shear), a fraction of the side (translate), bits kept (posterize), a
        threshold (solarize), an addend (solarize_add), a factor (color, contrast, brightness, sharpness), 0 (others).
        """
        sign = -1 if rng.random() < 0.5 else 1
        if name in ("color", "contrast", "brightness", "sharpness"):
            return max(0.1, 1 + sign * 0.9 * level) if self.increasing else 0.1 + 1.8 * level
        if name == "posterize":
            return 4 - int(4 * level) if self.increasing else int(4 * level)
        if name == "solarize":
            return 256 - int(256 * level) if self.increasing else int(256 * level)
        if name == "solarize_add":
            return int(110 * level)
        reach = {"rotate": 30, "shear_x": 0.3, "shear_y": 0.3, "translate_x": 0.45, "translate_y": 0.45}
        return sign * reach.get(name, 0) * level

    def ops(self, rng: np.random.Generator, size: tuple[int, int], interpolation: str, fill: Fill) -> list[ImageOp]:
        """Draws the operations for an image of `size` (H, W)."""
        return [as_op(*drawn, size, choose(interpolation, rng) == "bicubic", fill) for drawn in self.draw(rng)]


def as_op(name: str, amount: float, size: tuple[int, int], bicubic: bool, fill: Fill) -> ImageOp:
    """Makes an operation of RandAugment; those that move pixels are affine maps, which fill the border with `fill`."""
    moves = {
        "rotate": affine_matrix(amount, 1, (0, 0), size),
        "shear_x": (1, amount, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, amount, 1, 0),
        "translate_x": (1, 0, amount * size[1], 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, amount * size[0]),
    }
    return Warp(moves[name], bicubic, fill) if name in moves else PixelOp(name, amount)


def color_jitter(rng: np.random.Generator, strength: float) -> list[ImageOp]:
    """Draws brightness, contrast and colour by factors in 1 ± strength, in random order, like torchvision."""
    names = ("brightness", "contrast", "color")
    return [PixelOp(names[i], rng.uniform(max(0, 1 - strength), 1 + strength)) for i in rng.permutation(3)]


def choose(interpolation: str, rng: np.random.Generator) -> str:
    """Replaces "random" by bilinear or bicubic, each half of the time; returns other names as they are."""
    return ("bilinear", "bicubic")[rng.integers(2)] if interpolation == "random" else interpolation


def _unknown(text: str, part: str) -> UserError:
    return UserError(
        f"auto_augment must be null or RandAugment like {EXAMPLE} with the parts m, n, mstd, inc, mmax, p, each with "
        f"a number; got '{text}' with '{part}'"
    )
