"""Diagnostic tasks: grids of tokens, each a patch of an image, with an answer per token that follows from the grid.

A token is a patch of 4 x 4 pixels. Red and blue are the 32 bits of its key, dark or bright; the one bright pixel of
green is its value, 0 to 15, and without one it has none. Black is an empty place. Keys are drawn anew for each image,
so no network can know them by heart, and none is there twice.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from linvit.data.loading.sampler import generator
from linvit.data.sources.scenes import Generated
from linvit.errors import UserError, check_choice, check_number
from linvit.ignore_index import IGNORE_INDEX

PATCH = 4
VALUES = PATCH**2
BITS = 2 * PATCH**2
SAME_KIND = 4  # pairs of `nearest` that share a key
Size = tuple[int, int]


class Board(NamedTuple):
    """Tokens of a grid, each entry int (H, W): the number of a key, a value, and the answer; -1 is for none."""

    key: np.ndarray
    value: np.ndarray
    answer: np.ndarray


@dataclass(frozen=True)
class Diagnostic(Generated):
    """A task and how hard it is; for the attributes see `linvit.data.DiagnosticData`."""

    task: str = "recall"
    pairs: int = 32
    distractors: int = 0
    distance: int = 1
    grid: int | Size | None = None
    eval_grid: int | Size | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("--data.source", self.task, TASKS)
        check_number("pairs", self.pairs, at_least=1, whole=True)
        check_number("distractors", self.distractors, at_least=0, whole=True)
        check_number("distance", self.distance, at_least=1, whole=True)
        for split in ("train", "val"):
            height, width = self.size(split)
            if height * width < self.tokens or (self.task == "copy" and width <= self.distance):
                least = f"more than {self.distance} columns" if self.task == "copy" else f"{self.tokens} tokens"
                raise UserError(f"{self.task} needs a grid of {least}; got {height} x {width}. Leave the grid out")

    @property
    def tokens(self) -> int:
        """Tokens that the grid must have room for."""
        if self.task == "copy":
            return 1
        return self.pairs * VALUES if self.task == "counting" else 2 * self.pairs + self.distractors

    def size(self, split: str) -> Size:
        """Rows and columns of the grids of a split: those given, or those of the smallest square with enough tokens."""
        given = self.grid if split == "train" or self.eval_grid is None else self.eval_grid
        if given is None:
            given = math.isqrt(max(self.tokens, 2 * self.pairs) - 1) + 1
        return (given, given) if isinstance(given, int) else given


def recall(rng: np.random.Generator, given: Diagnostic, size: Size) -> Board:
    """Pairs (key, value), and for each a query (key), whose answer is the value; `distractors` are not asked for."""
    pairs = given.pairs + given.distractors
    values = rng.integers(VALUES, size=pairs)
    key, value, answer = np.full((3, pairs + given.pairs), -1)
    key[:pairs], value[:pairs] = np.arange(pairs), values
    key[pairs:], answer[pairs:] = np.arange(given.pairs), values[: given.pairs]
    return place(rng, size, key, value, answer)


def counting(rng: np.random.Generator, given: Diagnostic, size: Size) -> Board:
    """Tokens of `pairs` kinds, of each 1 to 16; one of each is asked how many others are like it."""
    counts = rng.integers(1, VALUES + 1, given.pairs)
    key = np.repeat(np.arange(given.pairs), counts)
    answer = np.full(len(key), -1)
    answer[counts.cumsum() - counts] = counts - 1
    return place(rng, size, key, np.full(len(key), -1), answer)


def nearest(rng: np.random.Generator, given: Diagnostic, size: Size) -> Board:
    """Pairs, of which up to 4 share a key, and queries: the value of the nearest such pair, if it is the only value."""
    kinds = np.arange(given.pairs) // SAME_KIND
    none = np.full(given.pairs, -1)
    value = rng.integers(VALUES, size=given.pairs)
    board = place(rng, size, np.r_[kinds, kinds], np.r_[value, none], np.full(2 * given.pairs, -1))
    pairs, queries = np.argwhere(board.value >= 0), np.argwhere((board.key >= 0) & (board.value < 0))
    far = ((queries[:, None] - pairs) ** 2).sum(-1)  # (queries, pairs)
    other = board.key[tuple(queries.T)][:, None] != board.key[tuple(pairs.T)]
    far[other] = far.max() + 1
    values, near = board.value[tuple(pairs.T)], far == far.min(1, keepdims=True)
    answer = values[near.argmax(1)]
    unclear = (near & (values != answer[:, None])).any(1)
    board.answer[tuple(queries.T)] = np.where(unclear, -1, answer)
    return board


def copy(rng: np.random.Generator, given: Diagnostic, size: Size) -> Board:
    """Tokens with a value and no key; the answer is the value of the token `distance` columns to the left."""
    value = rng.integers(VALUES, size=size)
    answer = np.full(size, -1)
    answer[:, given.distance :] = value[:, : -given.distance]
    return Board(np.full(size, -1), value, answer)


TASKS: dict[str, Callable[[np.random.Generator, Diagnostic, Size], Board]] = {
    task.__name__: task for task in (recall, counting, nearest, copy)
}


def place(rng: np.random.Generator, size: Size, key: np.ndarray, value: np.ndarray, answer: np.ndarray) -> Board:
    """Puts tokens at random places of a grid of a size (H, W)."""
    board = np.full((3, size[0] * size[1]), -1)
    board[:, rng.permutation(size[0] * size[1])[: len(key)]] = key, value, answer
    return Board(*board.reshape(3, *size))


def sample(split: str, seed: int, given: Diagnostic) -> dict[str, Any]:
    """`image`, 8-bit (3, 4 H, 4 W), and `mask`, the answers, 8-bit (H, W); 255 is for tokens that are not asked."""
    rng = generator(seed)
    board = TASKS[given.task](rng, given, given.size(split))
    mask = np.where(board.answer < 0, IGNORE_INDEX, board.answer).astype(np.uint8)
    return {"image": torch.from_numpy(painted(rng, board)), "mask": torch.from_numpy(mask)}


def painted(rng: np.random.Generator, board: Board) -> np.ndarray:
    """The image of a board, 8-bit (3, 4 H, 4 W)."""
    height, width = board.key.shape
    codes = rng.choice(2**BITS, board.key.max() + 2, replace=False, shuffle=False)
    codes[-1] = 0  # which the number -1 finds
    bits = codes[board.key][..., None] >> np.arange(BITS) & 1
    tokens = np.zeros((height, width, PATCH**2, 3), np.uint8)
    tokens[..., 0], tokens[..., 2] = bits[..., : PATCH**2], bits[..., PATCH**2 :]
    tokens[..., 1] = board.value[..., None] == np.arange(VALUES)
    patches = 255 * tokens.reshape(height, width, PATCH, PATCH, 3)
    return np.ascontiguousarray(patches.transpose(4, 0, 2, 1, 3).reshape(3, height * PATCH, width * PATCH))
