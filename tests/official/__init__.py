"""State dicts with the parameter names and shapes of the official repositories, one file per family."""

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def fill(shapes: Mapping[str, tuple[int, ...]], scale: float = 0.02) -> dict[str, Tensor]:
    """Reproducible float64 numbers for every name: a function of the name alone, so that they fit any implementation.

    Standard normal numbers, seeded by the crc32 of the name, rounded to float32 and scaled in float32; then 1 is added
    to the weights of norms and to running variances, and 0.5 to gammas.
    """
    state = {}
    for name, shape in shapes.items():
        numbers = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        values = torch.from_numpy((numbers.astype(np.float32) * np.float32(scale)).astype(np.float64))
        if (len(shape) == 1 and name.endswith(".weight")) or name.endswith("running_var"):
            values += 1
        if name.endswith("gamma"):
            values += 0.5
        state[name] = values
    return state


def images(height: int, width: int) -> Tensor:
    """The two images of the values measured with these numbers, (2, 3, H, W) in float64."""
    numbers = np.random.RandomState(0).standard_normal((2, 3, height, width))
    return torch.from_numpy(numbers.astype(np.float32).astype(np.float64))


def linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    """A linear layer with bias."""
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def conv(name: str, out: int, into: int, *kernel: int) -> dict[str, tuple[int, ...]]:
    """A convolution with bias; `into` counts channels per group."""
    return {f"{name}.weight": (out, into, *kernel), f"{name}.bias": (out,)}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    """A LayerNorm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
