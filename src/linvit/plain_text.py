"""Text from data and weights, such as class names and file names: harmless to a terminal and to a spreadsheet."""

import csv
from collections.abc import Iterable, Sequence
from typing import IO, Any

CONTROL = [
    *(*range(0x20), *range(0x7F, 0xA0)),  # C0, DEL and C1, which a terminal obeys
    *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # the direction of writing
    *(0x2028, 0x2029, *range(0xD800, 0xE000)),  # line ends, and what no encoding has: a file name that is not UTF-8
]
_ESCAPED = {code: chr(code).encode("unicode_escape").decode() for code in CONTROL}
_LINES = {code: text for code, text in _ESCAPED.items() if chr(code) not in "\n\t"}
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # and what is as wide as two letters


def printable(text: str, lines: bool = True) -> str:
    r"""A text whose control characters are written out, such as `\x1b`; with `lines`, line feeds and tabs stay."""
    return text.translate(_LINES if lines else _ESCAPED)


class PrintableStream:
    """A stream for a terminal, on which no text, wherever it is from, does more than to be read.

    What moves the cursor is written out, but as a progress bar writes it; so is what the stream's encoding lacks.
    """

    def __init__(self, stream: Any) -> None:
        self.unchecked = stream

    def write(self, text: str) -> int:
        """Writes a text; returns the length of what was given."""
        if text.replace("\x1b[A", "").strip("\n"):
            start, end = text.startswith("\r"), len(text) - text.endswith("\r")
            shown = f"{text[:start]}{printable(text[start:end])}{text[max(start, end) :]}"
            encoding = getattr(self.unchecked, "encoding", None) or "utf-8"
            text, given = shown.encode(encoding, "backslashreplace").decode(encoding), len(text)
        else:
            given = len(text)
        self.unchecked.write(text)
        return given

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unchecked, name)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table in GitHub's Markdown: its head and its rows, the first column of text, the others of numbers."""
    head, *lines = (
        f"| {' | '.join(printable(cell, lines=False).replace('|', chr(92) + '|') for cell in row)} |" for row in rows
    )
    return "\n".join([head, f"|---{'|---:' * (len(rows[0]) - 1)}|", *lines])


def write_csv(file: IO[str], rows: Iterable[Iterable[object]]) -> None:
    """Writes rows to a CSV file: one line each, and no cell that a spreadsheet would take for a formula."""
    csv.writer(file).writerows([cell_of(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)


def cell_of(text: str) -> str:
    """How a text stands in a cell; an apostrophe before a formula marks it as text, as in a spreadsheet."""
    if text.startswith(FORMULA) and not _is_number(text):
        text = f"'{text}"
    return printable(text, lines=False)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
