"""Makes text from data and weights, such as class names and file names, harmless to a terminal and a page."""

import csv
import re
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from linvit.io.reading import read_regular

CONTROL = [
    *(*range(0x20), *range(0x7F, 0xA0)),  # C0, DEL and C1, which terminals interpret
    *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # the direction of writing
    *(0x2028, 0x2029, *range(0xD800, 0xE000)),  # line ends; surrogates, which occur in file names that are not UTF-8
]
_ESCAPED = {code: chr(code).encode("unicode_escape").decode() for code in CONTROL}
_LINES = {code: text for code, text in _ESCAPED.items() if chr(code) not in "\n\t"}
Row = TypeVar("Row")


def printable(text: str, lines: bool = True) -> str:
    r"""Returns a text with control characters escaped, as `\x1b`; with `lines`, line feeds and tabs are kept."""
    return text.translate(_LINES if lines else _ESCAPED)


class PrintableStream:
    """Wraps the stream of a terminal so that printed text, from any source, cannot control the terminal.

    Control characters are escaped, except those of progress bars; so are characters that the encoding lacks.
    """

    def __init__(self, stream: Any) -> None:
        self.unchecked = stream

    def write(self, text: str) -> int:
        """Writes a text; returns its length before escaping."""
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


MARKDOWN = re.compile(r"[`|<&]|\\(?=[^\w\s]|_)|~(?=~)|(?<!\s)\*|\*(?=\S)|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.")
BRACKETS = re.compile(r"[\[\]]")  # brackets of an interval are kept
LINK = re.compile(r"\][(\[:]")


def markdown_text(text: str) -> str:
    """Returns a text as one line of Markdown, escaped so that it forms no HTML, link, code or emphasis."""
    escaped = MARKDOWN.sub(r"\\\g<0>", printable(text, lines=False))
    return BRACKETS.sub(r"\\\g<0>", escaped) if LINK.search(text) else escaped


def markdown_code(text: str) -> str:
    """Returns a text as a code span of Markdown."""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    space = " " * (len(fence) > 1)
    return f"{fence}{space}{printable(text, lines=False)}{space}{fence}"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in GitHub's Markdown: head and rows; the first column is text, the others are numbers."""
    head, *lines = (f"| {' | '.join(map(markdown_text, row))} |" for row in rows)
    return "\n".join([head, f"|---{'|---:' * (len(rows[0]) - 1)}|", *lines])


def write_csv(file: IO[str], rows: Iterable[Iterable[object]]) -> None:
    """Writes rows to a CSV file, one line each. Formulas of spreadsheets are not escaped."""
    csv.writer(file).writerows(
        [printable(cell, lines=False) if isinstance(cell, str) else cell for cell in row] for row in rows
    )


def read_csv(path: Path, column: str, parse: Callable[[Mapping[str, str]], Row]) -> list[Row]:
    """Returns the rows of a CSV file with a header line, as written by `write_csv` and for `metrics.csv`.

    Args:
        path: The file, which may be damaged: a kill, a full disk or an editor cuts and changes lines.
        column: A required column; without it no row is read.
        parse: Converts the cells, by column, to a row, or raises a `ValueError`.

    Warns about skipped lines: not UTF-8, more or fewer cells than the head, or rejected by `parse`.
    """
    found: list[Row] = []
    bad: list[tuple[int, str]] = []
    try:
        head, *lines = read_regular(path).splitlines() or [b""]
    except OSError as error:
        warnings.warn(f"'{path}' cannot be read: {error.strerror}", stacklevel=2)
        return found
    columns = _cells(head.removeprefix(b"\xef\xbb\xbf"), "replace")
    if column not in columns:
        if head or lines:
            warnings.warn(f"'{path}' has no column '{column}' in its first line: no row of it is read", stacklevel=2)
        return found
    for number, line in enumerate(lines, 2):
        try:
            cells = _cells(line)
            if len(cells) != len(columns):
                raise ValueError(f"it has {len(cells)} cells, and the first line {len(columns)}")
            found.append(parse(dict(zip(columns, cells, strict=True))))
        except (ValueError, csv.Error) as error:
            bad.append((number, str(error)))
    if bad:
        warnings.warn(
            f"{len(bad)} of {len(lines)} rows of '{path}' cannot be read and are skipped: line {bad[0][0]}: "
            f"{printable(bad[0][1], lines=False)}",
            stacklevel=2,
        )
    return found


def _cells(line: bytes, errors: str = "strict") -> list[str]:
    return next(csv.reader([line.decode("utf-8", errors)], strict=True), [])


def shown(path: Path) -> Path:
    """Returns a path relative to the current folder if it is inside it."""
    absolute = path.absolute()
    return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute


def as_argument(path: Path) -> str:
    """Returns a path as text that cannot be taken for an option or for a prefix such as `timm:`."""
    text = path.as_posix()
    return f"./{text}" if re.match(r"-|[^/]*:", text) and not path.is_absolute() else text


def in_shell(path: Path) -> str:
    """Returns a path as written in a shell command: `shown`, and quoted."""
    return shlex.quote(as_argument(shown(path)))
