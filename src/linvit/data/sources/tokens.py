"""Associative recall: grids of tokens, each a patch of an image; the answers of queries follow from the grid.

A token is a patch of 4 x 4 pixels. Red and blue are the 32 bits of its key, dark or bright; the one bright pixel of
green is its value, 0 to 15, and without one it has none. Black is an empty place. Each image draws new keys,
so no network can know them by heart, and none is there twice.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from linvit.data.loading.sampler import generator
from linvit.data.sources.scenes import Generated
from linvit.errors import UserError, check_number
from linvit.ignore_index import IGNORE_INDEX

PATCH = 4
VALUES = PATCH**2
BITS = 2 * PATCH**2
Size = tuple[int, int]


@dataclass(frozen=True)
class Recall(Generated):
    """Difficulty of the task; for the attributes see `linvit.data.DiagnosticData`."""

    pairs: int = 32
    grid: int | Size | None = None
    eval_grid: int | Size | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("pairs", self.pairs, at_least=1, whole=True)
        for split in ("train", "val"):
            height, width = self.size(split)
            if height * width < 2 * self.pairs:
                raise UserError(
                    f"recall of {self.pairs} pairs needs a grid of {2 * self.pairs} tokens; got {height} x {width}. "
                    f"Leave the grid out"
                )

    def size(self, split: str) -> Size:
        """Returns rows and columns of a split's grids: the given ones, or the smallest square with enough tokens."""
        given = self.grid if split == "train" or self.eval_grid is None else self.eval_grid
        if given is None:
            given = math.isqrt(2 * self.pairs - 1) + 1
        return (given, given) if isinstance(given, int) else given


def recall(rng: np.random.Generator, pairs: int, size: Size) -> np.ndarray:
    """Places pairs (key, value), and for each a query (key) whose answer is the value, on a grid of a size (H, W).

    Returns the number of the key, the value and the answer of each token, int (3, H, W); -1 is for none.
    """
    values, none = rng.integers(VALUES, size=pairs), np.full(pairs, -1)
    tokens = np.stack([np.r_[:pairs, :pairs], np.r_[values, none], np.r_[none, values]])  # (3, 2 pairs)
    board = np.full((3, size[0] * size[1]), -1)
    board[:, rng.permutation(size[0] * size[1])[: 2 * pairs]] = tokens
    return board.reshape(3, *size)


def sample(split: str, seed: int, given: Recall) -> dict[str, Any]:
    """`image`, 8-bit (3, 4 H, 4 W), and `mask`, the answers, 8-bit (H, W); 255 is for tokens that are not asked."""
    rng = generator(seed)
    key, value, answer = recall(rng, given.pairs, given.size(split))
    mask = np.where(answer < 0, IGNORE_INDEX, answer).astype(np.uint8)
    return {"image": torch.from_numpy(painted(rng, key, value)), "mask": torch.from_numpy(mask)}


def painted(rng: np.random.Generator, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Returns the image of tokens by their keys and values (H, W), 8-bit (3, 4 H, 4 W)."""
    height, width = key.shape
    codes = rng.choice(2**BITS, key.max() + 2, replace=False, shuffle=False)
    codes[-1] = 0  # which the number -1 finds
    bits = codes[key][..., None] >> np.arange(BITS) & 1
    tokens = np.zeros((height, width, PATCH**2, 3), np.uint8)
    tokens[..., 0], tokens[..., 2] = bits[..., : PATCH**2], bits[..., PATCH**2 :]
    tokens[..., 1] = value[..., None] == np.arange(VALUES)
    patches = 255 * tokens.reshape(height, width, PATCH, PATCH, 3)
    return np.ascontiguousarray(patches.transpose(4, 0, 2, 1, 3).reshape(3, height * PATCH, width * PATCH))
