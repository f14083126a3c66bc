"""Text from data and weights, such as class names and file names: harmless to a terminal and to a spreadsheet."""

import csv
from collections.abc import Iterable
from typing import IO

CONTROL = [*range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
"""Characters that a terminal obeys: C0, DEL and C1, and those that change the direction of writing."""
_ESCAPED = {code: chr(code).encode("unicode_escape").decode() for code in CONTROL}
_LINES = {code: text for code, text in _ESCAPED.items() if chr(code) not in "\n\t"}
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # and what is as wide as two letters


def printable(text: str, lines: bool = True) -> str:
    r"""A text whose control characters are written out, such as `\x1b`; with `lines`, line feeds and tabs stay."""
    return text.translate(_LINES if lines else _ESCAPED)


class CsvWriter:
    """Writes rows to a CSV file: one line each, and no cell that a spreadsheet would take for a formula.

    Such a cell gets an apostrophe before it, as a spreadsheet marks text. Numbers stay.

    Args:
        file: A text file that was opened with `newline=""`.
    """

    def __init__(self, file: IO[str]) -> None:
        self._writer = csv.writer(file)

    def writerow(self, cells: Iterable[object]) -> None:
        """Writes a row."""
        self._writer.writerow([cell_of(cell) if isinstance(cell, str) else cell for cell in cells])

    def writerows(self, rows: Iterable[Iterable[object]]) -> None:
        """Writes several rows."""
        for row in rows:
            self.writerow(row)


def cell_of(text: str) -> str:
    """How a text stands in a cell."""
    if text.startswith(FORMULA) and not _is_number(text):
        text = f"'{text}"
    return printable(text, lines=False)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
