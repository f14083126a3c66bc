"""Names of classes, from a file or of a known set."""

from pathlib import Path
from typing import Any, NamedTuple

from linvit.errors import UserError

KNOWN = Path(__file__).parents[1] / "class_names"


class Classes(NamedTuple):
    """The classes in the order of their labels: names, and what the data call them."""

    names: list[str]
    ids: list[Any]

    @property
    def labels(self) -> dict[Any, int]:
        """The label of each category."""
        return {key: label for label, key in enumerate(self.ids)}


def read_names(given: str) -> list[str]:
    """The names of a known set, or the lines of a file that are not empty."""
    known = KNOWN / f"{given}.txt"
    try:
        lines = (known if known.is_file() else Path(given).expanduser()).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        sets = ", ".join(sorted(file.stem for file in KNOWN.glob("*.txt")))
        raise UserError(
            f"cannot read class_names from '{given}': {error}. Give a list, a file with a name per line, or: {sets}"
        ) from error
    return [line.strip() for line in lines if line.strip()]
