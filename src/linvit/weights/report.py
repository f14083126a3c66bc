"""The report of what was loaded into a model."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from linvit.plain_text import printable


@dataclass
class Report:
    """Says what happened to every tensor of a model and of a file. Names are the model's.

    Attributes:
        source: The source.
        layout: The key layout of the file, such as "pvt".
        key: Where the weights were in the file: "model", "state_dict.ema.network", or "" if they were not nested.
        other_keys: The keys beside it.
        loaded: Names that were loaded as they are in the file.
        resized: Names that were resized from one grid to another, with the shapes.
        initialised: Names that the file cannot have, with the reason: a classifier of other classes, the parameters of
            another attention. They keep their initial values; a classifier of other classes is zero.
        missing: Names that the file should have and has not, or whose shapes differ, with the reason.
        unexpected: Names of the file that the model does not have.
        fraction: The part of the model that was loaded or resized, counted in numbers, between 0 and 1. The classifier
            and the parameters of another attention do not count, nor a head that the file does not have.
        part: What the fraction is of: "backbone", or "network" if the file has the head of one.
    """

    source: str
    layout: str
    key: str = ""
    other_keys: tuple[str, ...] = ()
    loaded: list[str] = field(default_factory=list)
    resized: dict[str, str] = field(default_factory=dict)
    initialised: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    fraction: float = 1.0
    part: str = "backbone"

    def __str__(self) -> str:
        """A few lines with the counts and the first names."""
        origin = f", from {self.key}" if self.key else ""
        beside = f" (beside it: {first_of(self.other_keys, 8)})" if self.other_keys else ""
        lines = [
            f"weights from {self.source}: {self.layout} names{origin}{beside}, {self.fraction:.1%} of the {self.part}"
        ]
        for kind in ("loaded", "resized", "initialised", "missing", "unexpected"):
            names = getattr(self, kind)
            shown = _reasons(names) if isinstance(names, dict) else "" if kind == "loaded" else first_of(names)
            lines.append(f"  {kind:<12}{len(names):>5}  {shown}".rstrip())
        return printable("\n".join(lines))


def first_of(names: Iterable[str], count: int = 3) -> str:
    """The first names, and how many more there are."""
    names = [re.sub(r"\s+", " ", name)[:60] for name in names]
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _reasons(names: Mapping[str, str]) -> str:
    """Each reason once, with the first names that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in names.items():
        by_reason.setdefault(reason, []).append(name)
    parts = [f"{first_of(some, 2)} ({reason})" for reason, some in by_reason.items()]
    return "; ".join(parts[:3]) + ("; ..." if len(parts) > 3 else "")
