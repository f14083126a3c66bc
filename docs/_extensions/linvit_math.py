"""Formulas: the notation of docstrings as LaTeX, and MathJax, which the site brings from an installed package."""

import re
import shutil
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

SCRIPT = "tex-svg.js"  # whole in one file, with its fonts
GREEK = {"alpha", "beta", "delta", "gamma", "lambda", "mu", "phi", "pi", "psi", "rho", "sigma", "tau", "theta"}
NAMED = {"eps": r"\varepsilon", "inf": r"\infty", "sum": r"\sum", "dk": "d_k", "dv": "d_v", "kt": r"\tilde{k}"}
NAMED |= {"qt": r"\tilde{q}", "LA": r"\mathrm{LA}"}
USUAL = ("cos", "sin", "exp", "log", "max", "min")
TOKEN = re.compile(
    r"(?P<number>\d+e-?\d+|\d[\d.]*)|(?P<word>[A-Za-z]+\d?(?!\w))|(?P<letters>[A-Za-z]+)|(?P<sub>_)|(?P<sup>\^)"
    r"|(?P<norm>\|\|)|(?P<bar>\|)|(?P<times>(?<=[\w)]) x (?=\w))|(?P<dot> ?\.(?= ?[A-Za-z(]) ?)"
    r"|(?P<star> \* )|(?P<least>>=)|(?P<most><=)|(?P<space>\s+)|(?P<other>.)"
)
SUBSCRIPT = re.compile(r"\{.*?\}|[A-Za-z0-9]+(,[A-Za-z0-9])?")
SUPERSCRIPT = re.compile(r"\{.*?\}|\(.*?\)|\|.*?\||-?[A-Za-z0-9]+(/\d+)?")
MATH = re.compile(r"[=^]| [-+*/] |\|\||_[a-z]\b")  # what a formula has, and the name of an option has not
CODE = re.compile(r"\"|'[a-z]{2,}'|\w=\S|\w\w_\w\w|::|\bof\b")


def setup(app: "Sphinx") -> dict[str, Any]:
    """Ships MathJax with the site; pages with formulas load it."""
    app.setup_extension("sphinx.ext.mathjax")
    app.config.mathjax_path = f"mathjax/{SCRIPT}"
    app.config.mathjax3_config = {"options": {"enableMenu": False}}  # which would load more files
    app.connect("build-finished", ship)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def ship(app: "Sphinx", error: Exception | None) -> None:
    """Copies MathJax to the site."""
    if error is None and app.builder.name == "html":
        folder = Path(app.outdir, "_static", "mathjax")
        folder.mkdir(parents=True, exist_ok=True)
        source = files("mathjax") / "static" / "mathjax"
        for name in (f"es5/{SCRIPT}", "LICENSE"):
            with as_file(source / name) as path:
                shutil.copyfile(path, folder / path.name)


def with_formulas(text: str) -> str:
    """Markdown in which code spans that are formulas are formulas."""
    return re.sub(
        r"`([^`]+)`", lambda found: f"{{math}}`{latex(found[1])}`" if is_formula(found[1]) else found[0], text
    )


def is_formula(span: str) -> bool:
    """True if a code span has operators, and neither strings nor options."""
    return MATH.search(span) is not None and CODE.search(span) is None


def latex(formula: str) -> str:
    """The notation of docstrings, such as `phi(q) (phi(k)^T v)`, as LaTeX."""
    found, at = [], 0
    while at < len(formula):
        if formula.startswith("sqrt(", at):
            end = closing(formula, at + 4)
            found.append(rf"\sqrt{{{latex(formula[at + 5 : end])}}}")
            at = end + 1
            continue
        token = TOKEN.match(formula, at)
        assert token is not None
        kind, text, at = token.lastgroup, token[0], token.end()
        if kind in ("sub", "sup"):
            inside = (SUBSCRIPT if kind == "sub" else SUPERSCRIPT).match(formula, at)
            words = inside[0] if inside else ""
            at += len(words)
            shown = r"\top" if words == "T" and kind == "sup" else latex(words.strip("{}()"))
            found.append(f"{text}{{{shown}}}")
        elif kind == "number":
            base, _, power = text.partition("e")
            found.append((base if base != "1" else "") + f"10^{{{power}}}" if power else text)
        elif kind in ("word", "letters"):
            found.append(word(text))
        else:
            signs = {"norm": r"\Vert ", "bar": r"\vert ", "times": r" \times ", "dot": r" \cdot ", "star": r" \odot "}
            signs |= {"least": r" \ge ", "most": r" \le "}
            found.append(
                signs.get(str(kind), {"{": r"\{", "}": r"\}", "%": r"\%", "#": r"\#", "&": r"\&"}.get(text, text))
            )
    return "".join(found).strip()


def word(text: str) -> str:
    """A letter, a Greek one, a function, or a name of several letters."""
    if text in NAMED:
        return NAMED[text] + " "
    if text in GREEK or text in USUAL:
        return f"\\{text} "
    if len(text) == 1:
        return text
    if len(text) == 2 and text[1].isdigit():
        return f"{text[0]}_{text[1]}"
    return rf"\mathit{{{text}}}" if len(text) == 2 else rf"\operatorname{{{text}}}"


def closing(text: str, at: int) -> int:
    """The place of the bracket that closes the one at a place."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"no bracket closes the one at {at} in {text!r}")
