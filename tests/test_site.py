"""The site's pages that are made of the package name all that is in it, and what is typed names what is there."""

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch import Trainer

import linvit.data
import linvit.tasks
from linvit.cli import HELP, OWN
from linvit.registry import attentions, backbones, heads
from linvit.registry.model_info import model_info
from linvit.runs import configs
from linvit.runs.parser import options_of
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
    table = pages.attentions_page(own_names(attentions))
    assert [name for name in own_names(attentions) if f"[`{name}`](attentions/{name}.md)" not in table] == []
    table = pages.backbones_page()
    assert [name for name in model_info() if f"| `{name}` |" not in table] == []
    table = pages.heads_page()
    assert [name for name in own_names(heads) if f"| `{name}` |" not in table] == []
    table, names = pages.recipes_page(), configs.names()
    papers = [name for name in names if "Paper" in configs.heading(configs.text(configs.config_file(name)))]
    assert [name for name in papers if f"| `{name}` |" not in table] == []


def test_one_page_names_all_linear_attentions():
    text = (DOCS / "explanation" / "linear_attention.md").read_text(encoding="utf-8")
    assert [name for name in own_names(attentions) if f"`{name}`" not in text] == ["softmax"]


def test_readme_counts_what_is_there():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(own_names(attentions)) - 2} of the {len(own_names(attentions))} attentions equal reference" in text
    assert f"| **Attentions** | {len(own_names(attentions))}, " in text
    assert f", {len(own_names(backbones)) - 1} in timm's registry" in text  # all but timm's own


def test_all_public_modules_are_documented(pages):
    assert {*pages.PUBLIC} == {"", *MODULES, "attention.kernels"}


def test_a_page_of_a_mechanism(pages):
    text = pages.attention_page("focused")
    assert text.startswith("# focused\n\nFocused linear attention (FLatten): {math}`o = \\phi _{p}(q)")
    assert "| 784 |" in text
    assert "`flatten_swin_tiny`" in text.partition("## Backbones that have it")[2]
    assert "imagenet/flatten_pvt_tiny" in text.partition("## Recipes")[2]
    assert "its caption" in text


def test_formulas_of_docstrings_become_formulas(pages):
    from linvit_math import latex, with_formulas

    assert latex("q_i . k_j / sqrt(d (d + 1))") == r"q_{i} \cdot k_{j} / \sqrt{d (d + 1)}"
    assert latex("a^{t-1} S^T * ||x||^2") == r"a^{t-1} S^{\top} \odot \Vert x\Vert ^{2}"
    assert latex("sum_m relu(k_m) + 1e-6") == r"\sum _{m} \operatorname{relu}(k_{m}) + 10^{-6}"
    options = 'the code (`norm_scope="per_head"`), `learn_scale`, `ridge=0` and `{head_dim: 16}`'
    assert with_formulas(options) == options
    for name in own_names(attentions):
        text = with_formulas(" ".join(pages.described(name)))
        assert not re.search(r"(?<!})`o(_\w+)? = ", text), name
        assert all(one.count("{") == one.count("}") for one in re.findall("{math}`(.*?)`", text)), name


def test_the_first_minute_is_a_notebook(monkeypatch):
    pytest.importorskip("nbformat")
    monkeypatch.syspath_prepend(DOCS / "_extensions")
    from linvit_wheel import PAGE, notebook

    page = PAGE.read_text(encoding="utf-8")
    cells = json.loads(notebook(page))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == page.count("{code-cell}") - page.count("remove-cell")
    assert code[0] == "%pip install --quiet linvit-*.whl"
    assert not any(":tags:" in one or "first_minute" in one for one in code)
    assert all(ast.parse(one) for one in code[1:])


def test_each_verb_has_its_help(pages, monkeypatch):
    monkeypatch.setattr(pages, "said", lambda *argv: HELP if argv == ("--help",) else "usage")
    text = pages.command_line_page()
    assert set(re.findall(r"^## linvit (.*)$", text, re.MULTILINE)) == {*OWN}
    assert text.count("```text\nusage\n") == len(OWN)


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
        *("## Docs", "", "- [linvit](https://a/0.1/index.html)", ""),
        *("## Reference", "", "- [Attentions](https://a/0.1/reference/attentions.html)"),
    ]
    found = re.findall(r"<loc>(.*?)</loc>", (app.outdir / "sitemap.xml").read_text())
    assert found == ["https://a/0.1/index.html", "https://a/0.1/reference/attentions.html"]


def test_prose_has_few_of_the_phrases_that_plain_english_does_without(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(DOCS)
    import prose

    assert prose.check(prose.all_paths(), prose.MOST) == []
    (tmp_path / "page.md").write_text(
        "Says\nwhat is there, of which one, too.\n\n```\nof which\n```\n", encoding="utf-8"
    )
    (tmp_path / "module.py").write_text('"""What it does."""\na = 1  # of which\n', encoding="utf-8")
    found = prose.check([tmp_path / "page.md", tmp_path / "module.py"], dict.fromkeys(prose.MOST, 0))
    assert [line.removeprefix(f"{tmp_path}/").partition(" (")[0] for line in found] == [
        "page.md:2: 'what is'",
        "module.py:1: 'What it'",
        "page.md:2: 'of which'",
        "module.py:2: 'of which'",
        "page.md:2: ', too'",
        "module.py:1: 'What '",
    ]


def test_versions(monkeypatch, tmp_path):
    """The newest is the highest number that is released, whatever was built last; other folders are none."""
    monkeypatch.syspath_prepend(DOCS / "_extensions")
    import linvit_versions

    for name in ("0.9", "0.10", "0.11rc1", "images"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    app = SimpleNamespace(
        outdir=tmp_path / "0.9", builder=SimpleNamespace(name="html"), config=SimpleNamespace(version="0.9")
    )
    linvit_versions.write_versions(app, None)
    assert "url=0.10/index.html" in (tmp_path / "index.html").read_text()
    listed = re.findall(r'href="(.*?)/index.html"', (tmp_path / "versions.html").read_text())
    assert listed == ["0.10", "0.9", "0.11rc1"]
    assert 'versions = ["0.10", "0.9", "0.11rc1"]' in (tmp_path / "versions.js").read_text()
    context = {}  # as of the page of searches
    linvit_versions.load_script(app, "reference/attentions/linear", "", context)
    assert 'src="../../../versions.js" data-version="0.9" data-up="../../../"' in context["metatags"]


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


GOOD = '<html lang="en"><h1 id="a">A</h1><h2>B</h2><div class="table-wrapper"><div></div><table></table></div>'


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (f'{GOOD}<img src="_images/b.png" alt="A digit"><a href="#a"></a><a href="https://b.c"></a>', []),
        (GOOD.replace("h1", "h2"), ["0 headings of the first level"]),
        (f"{GOOD}<h4>C</h4>", ["a level of headings is left out: [1, 2, 4]"]),
        (f'{GOOD}<img src="b.png">', ["no words for the picture b.png"]),
        (f'{GOOD}<script src="https://b.c/d.js"></script>', ["fetches https://b.c/d.js"]),
        (f'{GOOD}<a href="b.html"></a><a href="page.html#b"></a>', ["b.html", "page.html#b"]),
    ],
)
def test_what_is_wrong_with_a_page_is_found(pages, tmp_path, page, found):
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    lines = [line.removeprefix("page.html: ").removeprefix("leads nowhere: ") for line in pages.problems(tmp_path)]
    assert lines == found


def test_keys_of_configurations_have_type_default_and_meaning(pages):
    text = pages.keys_page()
    assert "| `lr` | `float` | `0.001` | Peak learning rate" in text
    assert "| `window` | `int \\| Sequence[int] \\| null` | `null` | Side, or [H, W]" in text
    assert "| `augmentation.hflip` | `float` | `0.5` |" in text
    assert [line for line in text.splitlines() if re.match(r"\|.*\| *\|$", line)] == []  # each says what it is


def test_the_tables_of_other_programs_name_options_of_linvit():
    """`--model.NAME` and the like on the page are options of a task, of its data or of the trainer."""
    text = (DOCS / "guides" / "migrate.md").read_text(encoding="utf-8")
    pairs = {
        "timm's train.py": (linvit.tasks.ClassificationTask, linvit.data.ClassificationData),
        "mmsegmentation": (linvit.tasks.SegmentationTask, linvit.data.SegmentationData),
        "mmdetection": (linvit.tasks.DetectionTask, linvit.data.DetectionData),
    }
    for title, (task, data) in pairs.items():
        section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
        owners = {"model": task, "data": data, "trainer": Trainer}
        named = re.findall(r"--(model|data|trainer)\.([\w.]+)", section)
        assert len(named) > 10
        assert [f"{part}.{name}" for part, name in named if name not in options_of(owners[part])] == []
        for head in re.findall(r"--model\.head=(.*?) \|", section):
            assert {name.strip(" `") for name in head.split(",")} <= {*heads.names()}
