"""Tables, prose and help that fit the terminal."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence

from linvit.plain_text import printable

LEAST = 32  # characters that the last column needs beside the others
BENEATH = " " * 6
FULL = 116  # characters of a docstring's line: 120 less the indentation that is taken off
ENTRY = re.compile(r" *\w+: ")
RAW = argparse.RawDescriptionHelpFormatter


def terminal_width() -> int:
    """Columns of the terminal, or of `COLUMNS`; 80 where neither is known."""
    return shutil.get_terminal_size().columns


def table(rows: Sequence[tuple[str, ...]], width: int | None = None) -> list[str]:
    """Aligned columns, those with numbers to the right, no line longer than `width` if that is possible.

    The last column holds sentences. It is wrapped beside the others, or stands beneath its row where they leave it too
    little room; one that does not fit and equals that of the row above is left out.
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
        parts = [] if repeated else textwrap.wrap(text, room, break_on_hyphens=False)
        if beside:
            first, *more = parts or [""]
            lines += [f"{start}{first}".rstrip(), *(" " * prefix + part for part in more)]
        else:
            lines += [start.rstrip(), *(BENEATH + part for part in parts)]
    return lines


def entry(start: str, text: str, column: int = 40) -> list[str]:
    """An option and its explanation, which begins at a column and is wrapped there."""
    parts = textwrap.wrap(text, terminal_width() - column, break_on_hyphens=False) or [""]
    if len(start) + 2 > column:
        return [start, *(" " * column + part for part in parts)]
    return [f"{start:<{column}}{parts[0]}".rstrip(), *(" " * column + part for part in parts[1:])]


def reflow(text: str, width: int | None = None) -> str:
    """Prose of a docstring, wrapped again where its lines are longer than `width`; lines that were not full stay."""
    width = terminal_width() if width is None else width
    return "\n".join(line for lines in _paragraphs(text) for line in _wrapped(lines, width))


def _paragraphs(text: str) -> Iterator[list[str]]:
    """Lines that belong together."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and not _continues(lines[-1], line):
            yield lines
            lines = []
        lines.append(line)
    yield lines


def _continues(line: str, after: str) -> bool:
    """Whether the next line continues an entry, or with a sentence because its first word did not fit on a line."""
    if not line.strip() or not after.strip():
        return False
    if _indent(after) != _indent(line):
        return _indent(after) > _indent(line) and ENTRY.match(line) is not None
    return len(line) + 1 + len(after.split()[0]) > FULL and not ENTRY.match(after)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _wrapped(lines: list[str], width: int) -> list[str]:
    if max(map(len, lines), default=0) <= width:
        return lines
    first = _indent(lines[0])
    others = _indent(lines[1]) if len(lines) > 1 else first + 4 * bool(first and ENTRY.match(lines[0]))
    return textwrap.wrap(
        " ".join(line.strip() for line in lines),
        width,
        initial_indent=" " * first,
        subsequent_indent=" " * others,
        break_on_hyphens=False,
        break_long_words=False,
    )


def argument_parser(program: str, description: str | None, epilog: str = "") -> argparse.ArgumentParser:
    """A parser whose help fits the terminal; `epilog` is printed as it is."""
    return argparse.ArgumentParser(program, description=reflow(description or ""), epilog=epilog, formatter_class=RAW)
