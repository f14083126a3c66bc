"""The documentation is true: its Python runs, its commands and configurations are understood, its links lead on."""

import contextlib
import io
import itertools
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import yaml
from PIL import Image

import linvit
from linvit.cli import HELP
from linvit.cli.training import VERBS
from linvit.inference.export import Export
from linvit.runs.configs import find
from linvit.runs.options import whole_names
from tests.cli.runs import linvit as command_line
from tests.data.coco import write_coco
from tests.data.images import image_folder
from tests.official import fill
from tests.official.swin import SIZES, swin
from tests.weights.files import save_flatten

ROOT = Path(__file__).parent.parent
WRITTEN = [
    "README.md",
    "CONTRIBUTING.md",
    "checkpoints/README.md",
    "docs/start.md",
    "docs/index.md",
    "docs/questions.md",
]
FOLDERS = [ROOT / "docs" / name for name in ("guides", "tutorials", "explanation", "results", "reference")]
GENERATED = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
FOUND = sorted(f"docs/{path.relative_to(ROOT / 'docs')}" for one in FOLDERS for path in one.glob("*.md"))
PAGES = {page: (ROOT / page).read_text(encoding="utf-8") for page in [*WRITTEN, *FOUND] if page not in GENERATED}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(language):
    """Code blocks of a language, with the page and the line that each is on."""
    found = []
    for page, text in PAGES.items():
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start(1)].count("\n") + 1
            found.append(pytest.param(match[1], id=f"{page}:{line}"))
    return found


def commands():
    """Command lines in the pages and in the help, without their comments."""
    lines = [line for block in blocks("bash") for line in block.values[0].replace("\\\n", " ").splitlines()]
    lines += re.findall(
        r"^ {8,}(linvit (?:fit|test|list|predict|validate) .*)", HELP.replace("\\\n", " "), re.MULTILINE
    )
    return sorted({shlex.join(shlex.split(line, comments=True)) for line in lines} - {""})


@pytest.fixture
def place(run, tmp_path):
    """A folder as the reader has it after the quickstart."""
    (tmp_path / "checkpoints").symlink_to(run.root / "checkpoints")
    (tmp_path / "photos").mkdir()
    for name in ("3", "4"):
        Image.new("RGB", (12, 9), "grey").save(tmp_path / "photos" / f"{name}.png")
    return tmp_path


def test_there_is_something_to_test():
    assert len(blocks("python")) >= 2
    assert len(blocks("bash")) >= 2
    assert {line.split()[0] for line in commands()} >= {"make", "linvit"}


# The programs of the page on exporting need a file, a server or torchao: tests/inference/test_serving.py.
@pytest.mark.parametrize("code", [code for code in blocks("python") if "guides/export" not in code.id])
def test_python_runs_and_prints_what_it_says(code, monkeypatch, request):
    if "linvit.load(" in code:  # of the quickstart's run, and photographs
        monkeypatch.chdir(request.getfixturevalue("place"))
    if "import transformers" in code or "from transformers" in code:
        pytest.importorskip("transformers")
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))
    if "linvit.fit(" in code or "read_config(" in code:
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))
    if "import optuna" in code:  # whose trials train for minutes
        stand_in_for_trials(monkeypatch, request.getfixturevalue("run"))
    for registry in (linvit.registry.attentions, linvit.registry.backbones, linvit.registry.heads):
        monkeypatch.setattr(registry, "_registered", {})
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    promised = re.findall(r"^print\(.*\)\s+# (.*)$", code, re.MULTILINE)
    assert out.getvalue().splitlines() == promised or not promised


def stand_in_for_trials(monkeypatch, run):
    """One trial in the place of Optuna's study, and a run that is there already in the place of its command."""

    class Study:
        def optimize(self, objective, n_trials):
            trial = SimpleNamespace(number=0, suggest_float=lambda name, low, high, log: low)
            self.best_params = objective(trial)
            assert 0 <= self.best_params <= 1

    def trained(source, **options):
        config = linvit.read_config(source)
        linvit.replace_options(config, whole_names(config, options))
        return SimpleNamespace(folder=run.folder)

    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(create_study=lambda **options: Study()))
    monkeypatch.setattr(linvit, "fit", trained)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_is_a_configuration(text, tmp_path):
    content = yaml.safe_load(text)
    assert content
    if isinstance(content, dict) and {"model", "data"} <= content.keys():
        (tmp_path / "mine.yaml").write_text(text)
        done = command_line("fit", "--config=mine.yaml", "--print_config", cwd=tmp_path)
        assert done.code == 0, done.err


@pytest.mark.parametrize("text", blocks("toml"))
def test_toml_is_toml(text):
    assert tomllib.loads(text)


class UnderstoodError(Exception):
    """All that a command names is there, and it begins to work."""


def understood(subject, *_, **__):
    """Stands for the work of a verb; raises if the mechanism or the backbone that is named is none."""
    name = subject.get("name") if isinstance(subject, dict) else subject
    if isinstance(name, str) and not name.startswith("checkpoints"):
        assert name in {*linvit.list_attentions(), *linvit.list_backbones(), *timm.list_models()}
    raise UnderstoodError


WORK = {  # of verbs that work for long, and have tests of it; what they ask first
    "check": ["linvit.cli.check.check_attention", "linvit.cli.check.check_backbone"],
    "bench": ["linvit.cli.bench.costs.costs_over_sizes"],
    "evaluate": ["linvit.cli.evaluate.Evaluator.__call__"],
    "probe": ["linvit.cli.probe.probe"],
    "analyze": ["linvit.cli.analyze.analyze"],
    "advise": ["linvit.advice.advise.advise"],
}


@pytest.mark.parametrize("line", commands())
def test_a_command_is_understood(line, place, monkeypatch):
    """A run that a command speaks of is one of the quickstart."""
    program, verb, *arguments = shlex.split(re.sub(r"\bRUN\b", "checkpoints/quickstart/version_0", line))
    if program == "make":
        assert {word for word in (verb, *arguments) if "=" not in word} <= TARGETS
    elif program == "linvit" and verb in VERBS and "--model" not in arguments:
        given = dict(itertools.pairwise(arguments))
        if "mine.yaml" in given.values():
            (place / "mine.yaml").write_text(find("quickstart").read_text(encoding="utf-8"), encoding="utf-8")
        assert find(given.get("--config", "quickstart"), place)
        assert (place / given.get("--ckpt_path", "")).exists()
        done = command_line(verb, *arguments, "--print_config", cwd=place)
        assert done.code == 0, done.err
    elif program == "linvit":
        if verb == "import-weights":
            save_flatten(fill(swin(**SIZES["tiny"], focused_stages=2)), place / arguments[0])
        if "path/to/imagenet" in arguments:
            image_folder(place / "path/to/imagenet", ["train", "val"], count=32)
        if "path/to/coco" in arguments:
            write_coco(place / "path/to/coco")
        if "from_the_gpu_machine" in arguments:
            (place / "from_the_gpu_machine").symlink_to(place / "checkpoints")
        if verb == "linearize":
            (place / "vits14.safetensors").touch()
            arguments.append("--print_config")
        if verb == "compare" and "--report" not in arguments:
            arguments.append("--dry_run")  # its cells are processes that train for minutes
            arguments = [argument.replace("=*", "=li*") for argument in arguments]  # a few of all
        if verb == "compare" and "--report" in arguments:
            arguments.append("--skip_costs")
        if verb == "export":  # what is written is tested in tests/cli/test_export.py
            monkeypatch.setattr(Export, "write", lambda export, path: export.wanted)
            arguments.append("--skip_latency")
        for work in WORK.get(verb, ()):
            monkeypatch.setattr(work, understood)
        with pytest.raises(UnderstoodError) if verb in WORK else contextlib.nullcontext():
            done = command_line(verb, *arguments, cwd=place)
            assert done.code == 0, done.err
    else:
        assert program in {"git", "cd", "source", "pip", "tensorboard", "python"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    links = [(ROOT / page).parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[page])]
    paths = [Path(os.path.normpath(link)) for link in links]
    assert [path for path in paths if not path.exists() and str(path.relative_to(ROOT)) not in GENERATED] == []
