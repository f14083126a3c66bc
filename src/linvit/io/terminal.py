"""Prints tables, prose and help that fit the terminal."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from linvit.io.plain_text import printable

LEAST = 32  # minimum width of the last column beside the others
BENEATH = " " * 6
FULL = 116  # width of a docstring's line: 120 minus the indentation
ENTRY = re.compile(r" *\w+: ")
RAW = argparse.RawDescriptionHelpFormatter


def terminal_width() -> int:
    """Returns the number of columns of the terminal, or `COLUMNS`; 80 if both are unknown."""
    return shutil.get_terminal_size().columns


def table(rows: Sequence[tuple[str, ...]], width: int | None = None) -> list[str]:
    """Returns the lines of a table with aligned columns, numbers to the right, at most `width` wide if possible.

    The last column contains sentences. It is wrapped beside the others, or printed below its row if too little space
    is left; if it does not fit and equals that of the previous row, it is left out.
    """
    width = terminal_width() if width is None else width
    rows = [tuple(printable(cell, lines=False) for cell in row) for row in rows]
    columns = list(zip(*rows, strict=True))[:-1]
    widths = [max(map(len, column)) for column in columns]
    numeric = [any(cell[:1].isdigit() for cell in each[1:]) and " " not in "".join(each[1:]) for each in columns]
    sides = [">" if is_numeric else "<" for is_numeric in numeric]
    prefix = sum(widths) + 2 * len(widths)
    beside = prefix + max(len(row[-1]) for row in rows) <= width or width - prefix >= LEAST
    lines, above = [], ""
    for *cells, text in rows:
        start = "".join(f"{cell:{side}{w}}  " for cell, side, w in zip(cells, sides, widths, strict=True))
        repeated = text == above and prefix + len(text) > width
        above = text
        room = width - (prefix if beside else len(BENEATH))
        parts = [] if repeated or not text else textwrap.wrap(text, room, break_on_hyphens=False)
        if beside:
            first, *more = parts or [""]
            lines += [f"{start}{first}".rstrip(), *(" " * prefix + part for part in more)]
        else:
            lines += [start.rstrip(), *(BENEATH + part for part in parts)]
    return lines


def entry(start: str, text: str, column: int = 40) -> list[str]:
    """Returns an option and its explanation, which starts at a column and is wrapped there."""
    parts = textwrap.wrap(text, terminal_width() - column, break_on_hyphens=False) or [""]
    if len(start) + 2 > column:
        return [start, *(" " * column + part for part in parts)]
    return [f"{start:<{column}}{parts[0]}".rstrip(), *(" " * column + part for part in parts[1:])]


def reflow(text: str, width: int | None = None) -> str:
    """Returns the prose of a docstring with lines longer than `width` wrapped again; short lines are kept."""
    width = terminal_width() if width is None else width
    paragraphs: list[list[str]] = []  # lines that belong together
    for line in text.splitlines():
        above = paragraphs[-1][-1] if paragraphs else ""
        deeper = _indent(line) - _indent(above)
        # a line continues a sentence if its first word did not fit on the previous line, or an entry if it is indented
        full = len(above) + 1 + len((line.split() or [""])[0]) > FULL and not ENTRY.match(line)
        if line.strip() and above.strip() and (full if deeper == 0 else deeper > 0 and ENTRY.match(above)):
            paragraphs[-1].append(line)
        else:
            paragraphs.append([line])
    wrapped: list[str] = []
    for lines in paragraphs:
        first = _indent(lines[0])
        others = _indent(lines[1]) if len(lines) > 1 else first + 4 * bool(first and ENTRY.match(lines[0]))
        indents = {"initial_indent": " " * first, "subsequent_indent": " " * others}
        whole, fits = " ".join(line.strip() for line in lines), max(map(len, lines)) <= width
        options: dict[str, Any] = {**indents, "break_on_hyphens": False, "break_long_words": False}
        wrapped += lines if fits else textwrap.wrap(whole, width, **options)
    return "\n".join(wrapped)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def argument_parser(program: str, description: str | None, epilog: str = "") -> argparse.ArgumentParser:
    """Returns a parser whose help fits the terminal; `epilog` is printed unchanged."""
    return argparse.ArgumentParser(program, description=reflow(description or ""), epilog=epilog, formatter_class=RAW)
