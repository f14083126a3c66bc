"""The site's pages that are made of the package name all that is in it, and what is typed names what is there."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from linvit.cli import HELP, PLAIN, VERBS
from linvit.model_info import model_info
from linvit.registry import attentions, backbones, heads
from linvit.runs import configs
from tests.helpers import own_names
from tests.test_public_api import MODULES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture
def pages(monkeypatch):
    """The module that writes them."""
    monkeypatch.syspath_prepend(DOCS / "_extensions")
    import linvit_pages

    monkeypatch.setattr(linvit_pages, "picture", lambda name: "its caption")
    return linvit_pages


def test_tables_have_a_row_of_each_name(pages):
    assert {
        name
        for name in own_names(attentions)
        if f"[`{name}`](attentions/{name}.md)" not in pages.attentions_page(own_names(attentions))
    } == set()
    assert {name for name in model_info() if f"| `{name}` |" not in pages.backbones_page()} == set()
    assert {name for name in own_names(heads) if f"| `{name}` |" not in pages.heads_page()} == set()
    recipes = pages.recipes_page()
    assert {
        name
        for name in configs.names()
        if f"| `{name}` |" not in recipes and "Paper" in configs.heading(configs.text(configs.config_file(name)))
    } == set()


def test_readme_counts_what_is_there():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"each of the {len(own_names(attentions))} equals" in text
    assert f"| **Attentions** | {len(own_names(attentions))}, " in text
    assert f", {len(own_names(backbones)) - 1} in timm's registry" in text  # all but timm's own


def test_all_public_modules_are_documented(pages):
    assert {*pages.PUBLIC} == {"", *MODULES, "attention.kernels"}


def test_a_page_of_a_mechanism(pages):
    text = pages.attention_page("focused")
    assert text.startswith("# focused\n\nFocused linear attention (FLatten): `o = phi_p(q)")
    assert "| 784 |" in text
    assert "`flatten_swin_tiny`" in text.partition("## Backbones that have it")[2]
    assert "imagenet/flatten_pvt_tiny" in text.partition("## Recipes")[2]
    assert "its caption" in text


def test_each_verb_has_its_help(pages, monkeypatch):
    monkeypatch.setattr(pages, "said", lambda *argv: HELP if argv == ("--help",) else "usage")
    text = pages.command_line_page()
    assert set(re.findall(r"^## linvit (.*)$", text, re.MULTILINE)) == {*VERBS, *PLAIN}
    assert text.count("```text\nusage\n") == len(VERBS) + len(PLAIN)


def test_indices(pages, tmp_path):
    titles = {"index": nodes("linvit"), "reference/attentions": nodes("Attentions"), "404": nodes("Page not found")}
    app = SimpleNamespace(
        outdir=tmp_path / "0.1",
        builder=SimpleNamespace(name="html"),
        config=SimpleNamespace(html_baseurl="https://a/0.1/"),
    )
    app.env = SimpleNamespace(titles=titles, found_docs={*titles})
    app.outdir.mkdir()
    pages.write_indices(app, None)
    assert (app.outdir / "llms.txt").read_text().splitlines()[4:] == [
        "- [linvit](https://a/0.1/index.html)",
        "- [Attentions](https://a/0.1/reference/attentions.html)",
    ]
    found = re.findall(r"<loc>(.*?)</loc>", (app.outdir / "sitemap.xml").read_text())
    assert found == ["https://a/0.1/index.html", "https://a/0.1/reference/attentions.html"]
    assert "url=0.1/index.html" in (tmp_path / "index.html").read_text()


def nodes(title):
    """A title as docutils has it."""
    return SimpleNamespace(astext=lambda: title)


def test_messages_that_are_explained_are_those_of_the_program():
    strings = {
        part.value if isinstance(part, ast.Constant) else ""
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for part in (node.values if isinstance(node, ast.JoinedStr) else [node])
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }
    explained = re.findall(
        r"^`([^`]+)`\n:", (DOCS / "reference" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert explained
    assert [text for text in explained if not any(text in string for string in strings)] == []
