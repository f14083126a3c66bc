"""Rivals of another attention: a smaller model of the same family."""

import re

import timm

SIZES = ("nano", "micro", "tiny", "small", "medium", "base", "large", "huge", "giant", "gigantic")
"""Words for sizes in timm's names, in their order."""


def smaller(name: str) -> str | None:
    """Returns timm's next smaller model of the same family by its name; None if timm has none."""
    for i, size in enumerate(SIZES):
        if re.search(rf"(?<![a-z]){size}(?![a-z])", name):
            others = [re.sub(rf"(?<![a-z]){size}(?![a-z])", one, name.partition(".")[0]) for one in SIZES[:i][::-1]]
            return next((one for one in others if timm.is_model(one)), None)
    found = re.search(r"_b([1-9])", name)
    other = name.replace(found[0], f"_b{int(found[1]) - 1}") if found else ""
    return other if timm.is_model(other) else None
