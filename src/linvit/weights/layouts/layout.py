"""Layout of the parameter names of an official repository, and its translation to linvit's names."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

Rename = tuple[str, str | Callable[[re.Match[str]], str]]
"""A regular expression and its replacement, as in `re.sub`."""


def agents_before_places(tensor: Tensor) -> Tensor:
    """Returns a bias of the queries, (1, h, H, 1, n), (1, h, 1, W, n) or (1, h, 1, n), as (h, n, ...)."""
    table = tensor.squeeze(0)
    return table.movedim(-1, 1) if table.ndim > 2 else table


AGENT: Rename = (r"(?<!tables)\.(?:mechanism\.)?((?:a[nhwc]|[nhwc]a)_bias)$", r".mechanism.tables.\1")
AGENT_CONVERSIONS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    (r".*(?<!tables)\.a[hwc]_bias", lambda tensor: tensor.squeeze(0)),
    (r".*(?<!tables)\.[hwc]a_bias", agents_before_places),
)
"""Parameters of Agent Attention in its authors' checkpoints, in any layout."""


@dataclass(frozen=True)
class Layout:
    """The key layout of one official repository."""

    name: str
    marks: tuple[str, ...]  # regular expressions; a file is of this layout if each of them matches some whole key
    renames: tuple[Rename, ...] = ()  # applied in this order, each to the result of the previous one
    drops: tuple[str, ...] = ()  # of whole keys without learned values (buffers that the model computes itself)
    absent: tuple[str, ...] = ()  # keys that files of this layout do not have; distinguishes similar layouts
    conversions: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = ()  # by whole keys: functions for the values
    split: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict  # applied first: splits joined projections

    def recognises(self, keys: Iterable[str]) -> bool:
        """Returns True if keys are of this layout."""
        keys = list(keys)
        found = [any(re.fullmatch(mark, key) for key in keys) for mark in (*self.marks, *self.absent)]
        return all(found[: len(self.marks)]) and not any(found[len(self.marks) :])

    def translate(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a state dict under our names."""
        return {
            self.rename(key): self.convert(key, tensor)
            for key, tensor in self.split(state).items()
            if not any(re.fullmatch(drop, key) for drop in self.drops)
        }

    def convert(self, key: str, tensor: Tensor) -> Tensor:
        """Converts the value of an official parameter to linvit's."""
        for pattern, change in (*self.conversions, *AGENT_CONVERSIONS):
            if re.fullmatch(pattern, key):
                tensor = change(tensor)
        return tensor

    def rename(self, key: str) -> str:
        """Translates the name of an official parameter to linvit's."""
        for pattern, new in (*self.renames, AGENT):
            key = re.sub(pattern, new, key)
        return key


OWN = Layout(name="linvit", marks=(r".*",))
"""The model's own names: nothing to translate."""


def count_from_zero(template: str) -> Callable[[re.Match[str]], str]:
    """Returns a replacement whose `{}` is the match's first group minus one: official stages count from one."""
    return lambda match: template.format(int(match[1]) - 1)


def flat(kernel: Tensor) -> Tensor:
    """Returns the weight (C', C) of a 1 x 1 convolution (C', C, 1, 1); tensors with fewer axes are unchanged."""
    return kernel.flatten(1) if kernel.ndim == 4 else kernel
