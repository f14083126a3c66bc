"""One self-contained HTML page: headings, text, tables and pictures in one file that needs no network and no script."""

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

from PIL import Image

from linvit.io.files import write_text
from linvit.io.plain_text import printable
from linvit.io.reading import read_regular

Picture = Path | Image.Image | str
"""The path of a PNG or SVG file, a PIL image, or the text of an SVG."""
Either = tuple[Picture, Picture]
"""A picture for readers who have chosen light, and one for those who have chosen dark."""

HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1c2024; --soft: #5d666f; --line: #d8dde2; --stripe: #f4f6f8; --back: #fff }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e4e7ea; --soft: #9da7b0; --line: #3a424a; --stripe: #20262c; --back: #161b20 }}
}}
* {{ box-sizing: border-box }}
body {{ margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 75rem; color: var(--ink); background: var(--back);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }}
h1, h2 {{ line-height: 1.25; margin: 2rem 0 .6rem }}
h1 {{ margin-top: 0 }}
p {{ max-width: 48rem; margin: .6rem 0 }}
.scroll {{ overflow-x: auto; margin: 1rem 0 }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal }}
.caption, figcaption {{ color: var(--soft); text-align: left; font-size: .9rem; padding: .3rem 0 }}
th, td {{ padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top }}
th {{ font-weight: 600 }}
td:first-child, th:first-child, .text {{ text-align: left }}
td:not(.text):not(:first-child) {{ white-space: nowrap }}
tbody tr:nth-child(even) {{ background: var(--stripe) }}
.pictures {{ display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0 }}
figure {{ margin: 0; max-width: 100% }}
.pictures figure {{ display: table }}
.pictures figcaption {{ display: table-caption; caption-side: bottom }}
img {{ display: block; max-width: 100%; height: auto; background: #fff }}
details {{ margin: 1rem 0; border: 1px solid var(--line); border-radius: 5px; padding: .4rem .9rem }}
summary {{ cursor: pointer; font-weight: 600 }}
pre {{ background: var(--stripe); padding: .7rem .9rem; overflow-x: auto; border-radius: 5px; font-size: .88rem }}
</style>
"""


class Page:
    """An HTML page that is written part by part; all input is text, and is escaped.

    It follows the reader's choice of light or dark, fits narrow screens, loads nothing and runs no script.
    """

    def __init__(self, title: str) -> None:
        self._parts = [HEAD.format(title=_text(title)), f"<h1>{_text(title)}</h1>\n"]

    def heading(self, text: str) -> None:
        """A heading below the title."""
        self._parts.append(f"<h2>{_text(text)}</h2>\n")

    def paragraph(self, text: str) -> None:
        """A paragraph."""
        self._parts.append(f"<p>{_text(text)}</p>\n")

    def code(self, text: str) -> None:
        """Adds lines verbatim: a command, a configuration, a log."""
        self._parts.append(f"<pre>{_text(text, lines=True)}</pre>\n")

    def table(self, titles: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> None:
        """A table of cells as `str` has them, None empty; columns of numbers, but the first, go to the right."""
        shown = [["" if cell is None else str(cell) for cell in row] for row in rows]
        texts = [not all(_numeric(cell) for cell in column) for column in zip(*shown, strict=True)]
        kinds = [' class="text"' if text else "" for text in texts or [False] * len(titles)]
        head = "".join(f'<th scope="col"{kind}>{_text(title)}</th>' for kind, title in zip(kinds, titles, strict=True))
        body = (
            "<tr>" + "".join(f"<td{kind}>{_text(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>\n"
            for row in shown
        )
        caption = f'<p class="caption">{_text(caption)}</p>\n' if caption else ""
        self._parts.append(
            f'{caption}<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{"".join(body)}</tbody>'
            "</table></div>\n"
        )

    def pictures(self, pictures: Iterable[tuple[Picture | Either, str]], width: int | None = None) -> None:
        """Pictures beside one another, with captions; the width is in CSS pixels, None a picture's own."""
        size = "" if width is None else f' width="{width}"'

        def dark(picture: Picture | Either) -> str:
            uri = _data_uri(picture[1]) if isinstance(picture, tuple) else ""
            return f'<source srcset="{uri}" media="(prefers-color-scheme: dark)">' * bool(uri)

        figures = (
            f'<figure><picture>{dark(picture)}<img src="{_data_uri(picture)}" alt="{_text(caption)}"{size}>'
            f"</picture><figcaption>{_text(caption)}</figcaption></figure>\n"
            for picture, caption in pictures
        )
        self._parts.append(f'<div class="pictures">{"".join(figures)}</div>\n')

    @contextmanager
    def folded(self, title: str, opened: bool = False) -> Iterator[None]:
        """Folds the content of the `with` block; a click on the title unfolds it."""
        self._parts.append(f"<details{' open' if opened else ''}><summary>{_text(title)}</summary>\n")
        yield
        self._parts.append("</details>\n")

    def write(self, path: Path) -> None:
        """Writes the page as it is so far; after a kill the file is complete, or the previous one."""
        write_text(path, "".join([*self._parts, "</html>\n"]))


def _text(text: str, lines: bool = False) -> str:
    return escape(printable(text, lines))


def _numeric(cell: str) -> bool:
    """True if a cell is empty, or begins with a digit behind signs, as "-0.5", "98.6 ± 0.1" and "12 %" do."""
    return not cell or cell.lstrip("+-\u2212<>≤≥~ ")[:1].isdecimal() or cell.lower() in ("nan", "inf", "-inf", "-")


def _data_uri(picture: Picture | Either) -> str:
    kind, picture = "png", picture[0] if isinstance(picture, tuple) else picture
    if isinstance(picture, Path):
        kind = "svg+xml" if picture.suffix == ".svg" else "png"
        content = read_regular(picture)
    elif isinstance(picture, str):
        kind, content = "svg+xml", picture.encode("utf-8")
    else:
        file = io.BytesIO()
        picture.save(file, "png")
        content = file.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
