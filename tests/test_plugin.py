"""A real third-party package, installed by pip from tests/plugin/linvit-cosine, and five broken ones beside it."""

import functools
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import linvit
from tests.plugin.distributions import forked, python, write_distribution

ROOT = Path(__file__).parent.parent
PACKAGE = Path(__file__).parent / "plugin" / "linvit-cosine"
HEAD_WIDTH = 32  # deit_nano: 96 channels, 3 heads

BROKEN = {  # name -> its module, how its line in `linvit list` ends
    "bad_import": (
        "import no_such_dependency\n",
        "broken: ModuleNotFoundError: No module named 'no_such_dependency'",
    ),
    "bad_syntax": ("def (:\n", "broken: SyntaxError: invalid syntax (bad_syntax.py, line 1)"),
    "bad_type": (
        '"""A class, but no attention."""\nclass Mine:\n    pass\n',
        "<class 'bad_type.Mine'>, not a subclass of linvit.attention.base.Attention",
    ),
    "bad_exit": (
        "import sys\nsys.exit(0)\n",
        "broken: SystemExit: 0",
    ),
    "bad_sleep": (
        '"""Slow, but sound."""\nimport time\ntime.sleep(5)\nimport linvit\nclass Mine(linvit.Attention):\n    pass\n',
        "Slow, but sound.",
    ),
}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Keeps each entry of a list on one line."""
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """A function that returns the folder that pip installed a package of tests/plugin into, once."""

    @functools.cache
    def install(package):
        source = tmp_path_factory.mktemp("source") / package.name
        shutil.copytree(package, source)  # setuptools leaves build files beside what it builds
        target = tmp_path_factory.mktemp("site")
        if package != PACKAGE:  # pip takes seconds, and leaves the same
            project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            points = [
                f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in names.items())
                for group, names in project["entry-points"].items()
            ]
            modules = {file.stem: file.read_text(encoding="utf-8") for file in package.glob("linvit_*.py")}
            write_distribution(target, project["name"], project["version"], "".join(points), **modules)
            return target
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", target]
        done = subprocess.run([*pip, *options, source], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return target

    return install


@pytest.fixture(scope="session")
def cosine(installed):
    """The folder that pip installed linvit-cosine into."""
    return installed(PACKAGE)


@pytest.fixture(scope="session")
def broken(tmp_path_factory, cosine):
    """The folder of linvit-cosine, copied, with five broken plug-ins."""
    folder = tmp_path_factory.mktemp("broken") / "site"
    shutil.copytree(cosine, folder)
    for name, (code, _) in BROKEN.items():
        entry_points = f"[linvit.attentions]\n{name} = {name}:Mine\n"
        write_distribution(folder, f"linvit-{name.replace('_', '-')}", "0.1", entry_points, **{name: code})
    return folder


def line_of(name, text):
    """The last line about a name."""
    return [line for line in text.splitlines() if name in line.replace("'", " ").split()][-1]


def test_the_plugin_is_listed_with_its_owner_and_documented(cosine):
    code = "from linvit.cli import main\nassert main(['list']) == main(['list', 'attentions', 'cosine']) == 0\n"
    done = forked(code, cosine)
    assert done.returncode == 0, done.stdout
    (line, *_) = (line for line in done.stdout.splitlines() if line.split()[:1] == ["cosine"])
    assert line.split(maxsplit=3)[1:] == ["linvit-cosine", "0.2", "Cosine linear attention, O(N d^2)."]
    for said in ("from linvit_cosine:Cosine, linvit-cosine 0.2\n", "`o = q (k^T v) / M`", "options: none"):
        assert said in done.stdout


def test_the_plugin_works_in_a_backbone_and_its_matrix_has_low_rank(cosine):
    code = f"""
import linvit, torch
from linvit.analysis import attention_matrix, rank
model = linvit.create_backbone("deit_nano", attention="cosine", num_classes=10)
logits = model(torch.randn(2, 3, 32, 32))
assert logits.shape == (2, 10)
logits.sum().backward()
assert all(parameter.grad is not None for parameter in model.parameters())
mechanism = model.blocks[0].attn.mechanism
assert type(mechanism).__module__ == "linvit_cosine"
grid = linvit.Grid((8, 8))
q, k = torch.randn(2, 1, 3, 64, {HEAD_WIDTH})
matrix = attention_matrix(mechanism, q, k, grid)
assert matrix.shape == (1, 3, 64, 64)
assert (rank(matrix) <= {HEAD_WIDTH}).all(), rank(matrix)
q, k = (x.double() / x.double().norm(dim=-1, keepdim=True) for x in (q, k))
assert torch.allclose(matrix, q @ k.mT / 64)
"""
    done = forked(code, cosine)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_plugin_trains_through_the_command_line_with_rank_logging(cosine, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = ROOT / "configs" / "quickstart.yaml"
    short = ["max_epochs=1", "limit_train_batches=2", "limit_val_batches=1", "accelerator=cpu"]
    options = ["--model.attention=cosine", *(f"--trainer.{option}" for option in short)]
    done = python("-m", "linvit", "fit", "--config", str(config), *options, path=cosine, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    events = sorted(tmp_path.rglob("events.out.tfevents.*"))
    assert events, "no TensorBoard events in the run folder"
    ranks = {}
    for file in events:
        log = EventAccumulator(str(file)).Reload()
        for tag in log.Tags()["scalars"]:
            if tag.startswith("rank/"):
                ranks[tag] = [event.value for event in log.Scalars(tag)]
    assert ranks, "no rank was logged"
    assert all(0 < value <= HEAD_WIDTH for values in ranks.values() for value in values), ranks


def test_broken_plugins_are_named_and_do_not_end_the_list(broken):
    code = "import time\nfrom linvit.cli import main\ntime.sleep = lambda _: None\nassert main(['list']) == 0\n"
    done = forked(code, broken)
    assert done.returncode == 0, done.stdout
    for name in [*linvit.list_attentions(), *linvit.list_backbones(), "cosine"]:
        assert "broken" not in line_of(name, done.stdout)
    for name, (_, remark) in BROKEN.items():
        line = line_of(name, done.stdout)
        assert f"linvit-{name.replace('_', '-')} 0.1" in line
        assert line.rstrip().endswith(remark)


def test_a_run_names_its_plugin_alone_and_one_that_is_broken_fails_and_says_whose_it_is(broken):
    named = ["bad_import", "bad_syntax", "bad_type", "bad_exit"]
    code = f"""
import linvit, sys
for name in ("linear", "cosine"):
    linvit.create_backbone("deit_nano", attention=name, num_classes=10)
assert not {set(BROKEN)!r} & set(sys.modules)
for name in ["cosin", *{named!r}]:
    try:
        linvit.create_attention(name, dim=8, num_heads=1, grid=None)
    except linvit.UserError as error:
        print(error)
"""
    done = forked(code, broken)
    assert done.returncode == 0, done.stdout
    assert "no attention is called 'cosin'. Did you mean 'cosine'?" in done.stdout
    assert "cosine (linvit-cosine 0.2)" in done.stdout
    for name in named:
        assert f"attention '{name}' of linvit-{name.replace('_', '-')} 0.1 " in done.stdout


def test_a_third_partys_backbone(installed):
    """It is found by its entry point and by timm, is sound, and is trained for a step, through a factory, too."""
    folder = installed(PACKAGE.parent / "linvit-two-stage")
    code = """
import linvit, linvit.backbones, timm, torch
from linvit.tasks import ClassificationTask

assert linvit.list_backbones("two_*") == ["two_stage_small", "two_stage_tiny"]
features = timm.create_model("two_stage_small", features_only=True)(torch.zeros(1, 3, 32, 48))
assert [tuple(level.shape) for level in features] == [(1, 64, 8, 12), (1, 128, 4, 6)]
for backbone in ("two_stage_tiny", "linvit_two_stage:build"):
    task = ClassificationTask(backbone=backbone, attention="focused", num_classes=4, img_size=32)
    images, before = torch.randn(2, 3, 32, 32), [p.clone() for p in task.parameters()]
    torch.nn.functional.cross_entropy(task(images), torch.tensor([1, 2])).backward()
    torch.optim.SGD(task.parameters(), lr=0.1).step()
    assert all(not torch.equal(p, old) for p, old in zip(task.parameters(), before)), backbone
"""
    done = forked(code, folder)
    assert done.returncode == 0, done.stdout


def test_a_third_partys_verb(installed):
    folder = installed(PACKAGE.parent / "linvit-two-stage")
    code = """
from linvit.cli import main

assert main(["--help"]) == 0
assert main(["stages", "two_stage_small"]) == 0
"""
    done = forked(code, folder)
    assert done.returncode == 0, done.stdout
    assert line_of("stages", done.stdout).split()[1:3] == ["linvit-two-stage", "0.1"]
    assert done.stdout.endswith("64 channels, stride 4\n128 channels, stride 8\n")


def test_a_third_partys_head(installed):
    """It is listed, is put on a backbone of ours, and is named by its class path, too."""
    folder = installed(PACKAGE.parent / "linvit-skip-fcn")
    code = """
import linvit, torch
from linvit.cli import main

assert main(["list", "heads"]) == 0
for head in ("skip_fcn", "linvit_skip_fcn:SkipFCN"):
    model = linvit.create_segmentor("pvt_v2_b0", {"name": head, "dropout": 0.0}, num_classes=4)
    logits, others = model(torch.randn(1, 3, 45, 61), auxiliary=True)
    assert [maps.shape for maps in (logits, *others)] == [(1, 4, 45, 61)] * 2
    (logits.sum() + others[0].sum()).backward()
"""
    done = forked(code, folder)
    assert done.returncode == 0, done.stdout
    assert line_of("skip_fcn", done.stdout).split()[1:5] == ["linvit-skip-fcn", "0.1", "Long", "et"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case", "skipped"),
    [
        ("cosine", "cosine-gradients", "not declared: factors(q, k, grid) gives None"),
        ("two-stage", "two_stage_tiny-another-attention", ""),
        ("skip-fcn", "size1", ""),
        ("cells", "without boxes", ""),
    ],
)
def test_a_third_partys_own_suite(name, case, skipped, installed):
    """It has one case of pytest per clause of the contract, or tests of its own."""
    package = PACKAGE.parent / f"linvit-{name}"
    suite = package / f"test_{name.replace('-', '_')}.py"
    options = ["-q", "-rA", "-p", "no:cacheprovider", "--rootdir", str(package)]
    done = python("-m", "pytest", *options, str(suite), path=installed(package))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"[{case}]" in done.stdout
    assert skipped in done.stdout
