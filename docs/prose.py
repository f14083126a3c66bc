"""Counts phrases that plain English does without, in docstrings, comments, messages and pages: `python docs/prose.py`.

`make docs` and a test run it. If a phrase occurs more often than `MOST` allows, reword the new sentence. The counts are
a thermometer: a page without these phrases can still be hard to read.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
GENERATED = re.compile(r"/_build/|/reference/(attentions|backbones|command_line|heads|keys|python|recipes)\b")
MOST = {  # how often each phrase may occur; lower a number after rewording
    r"\bwhat (?:a|an|the|of|is|was|it|they|linvit|others|torch|comes|follows|reaches)\b": 48,
    r"\bof which\b": 4,
    r"\bof (?:its|their) own\b": 10,
    r"\b(?:lies|lie|stands|goes by|for want|anew|unsaid|as ever|in words)\b": 8,
    r", too\b": 8,
    r"\b(?:nobody|none of)\b": 10,
    r"\A(?-i:What|Whether|Where|How) ": 4,  # first word of a docstring
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the prose of a page (without code blocks) or of a module (strings and comments), with its lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for number, line in enumerate(text.split("\n"), 1):
        yield number, line.partition(" # ")[2]


def check(paths: list[Path], most: dict[str, int]) -> list[str]:
    """Returns the places of the phrases that occur more often than allowed."""
    prose = [(path, line, text) for path in paths for line, text in texts(path)]
    said = []
    for phrase, limit in most.items():
        found = [(p, n + t[: m.start()].count("\n"), m[0]) for p, n, t in prose for m in re.finditer(phrase, t, re.I)]
        said += [f"{p}:{n}: {word!r} ({len(found)}, at most {limit})" for p, n, word in found] * (len(found) > limit)
    return said


def all_paths() -> list[Path]:
    """Returns the modules of linvit and all pages that are not generated."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY"))]
    return [*sorted((ROOT / "src").rglob("*.py")), *(p for p in sorted(pages) if not GENERATED.search(p.as_posix()))]


if __name__ == "__main__":
    sys.exit("\n".join(check(all_paths(), MOST)) or 0)
