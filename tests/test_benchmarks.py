"""What benchmarks compare with is what the authors' code computes."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import linvit
from benchmarks import loading
from tests.golden_files import Golden, of_case
from tests.helpers import perturb

FOLDER = Path(__file__).parents[1] / "benchmarks"
PICTURE = FOLDER.parent / "docs" / "results" / "linearized.svg"


def test_what_they_import_of_linvit_is_there() -> None:
    for script in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "linvit":
                for name in node.names:
                    found = importlib.import_module(node.module or "")
                    if not hasattr(found, name.name):
                        importlib.import_module(f"{node.module}.{name.name}")


@pytest.fixture
def authors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package of the authors' models, beside the scripts that import it."""
    monkeypatch.syspath_prepend(FOLDER)
    import authors.focused

    return authors


@of_case("focused_swin")
def test_focused_attention(golden: Golden, authors: Any) -> None:
    official = golden.constructor
    layer = authors.focused.Focused(official["dim"], tuple(official["window_size"]), official["num_heads"])
    torch.nn.init.zeros_(layer.qkv.bias)
    layer.load_state_dict(golden.parameters(), strict=False)  # one has no bias
    golden.check_call(layer(*(given := golden.inputs(torch.float32))), given)
    golden.check_parameters(layer, str)


@of_case("flatten_swin", "soft")
def test_models(golden: Golden, authors: Any) -> None:
    official = golden.constructor
    classes, depths, heads = official["num_classes"], official["depths"], official["num_heads"]
    if golden.meta["case"] == "soft":
        model = authors.SOFT(classes, official["embed_dims"], heads, depths, official["mlp_ratios"][3])
    else:
        dim, window, ratio = official["embed_dim"], official["window_size"], official["mlp_ratio"]
        size = tuple(official["img_size"])
        model = authors.FlattenSwin(size, classes, dim, depths, heads, window, ratio, official["attn_type"], eps=1e-6)
    model.load_state_dict(golden.parameters())
    golden.check_call(model.eval()(*(given := golden.inputs(torch.float32))), given)


@pytest.mark.parametrize("name", ["flatten_pvt_tiny", "flatten_deit_tiny"])
def test_models_without_a_golden_file_equal_ours(name: str, authors: Any) -> None:
    theirs = perturb(authors.MODELS[name]((32, 32), 5))
    ours = linvit.create_backbone(name, img_size=32, num_classes=5)
    assert linvit.load_pretrained(ours, theirs.state_dict()).fraction == 1
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(theirs.eval()(images), ours.eval()(images), rtol=1e-4, atol=1e-5)


def test_the_readmes_picture_is_drawn_from_the_table_of_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import linearized

    rows = dict(linearized.table())
    assert len(rows) == 12
    assert rows["linear"] == [0.274, 0.035, 0.942, 0.007]
    drawn, given = (re.findall(r">([a-z].*?)</text>", text) for text in (linearized.picture(), PICTURE.read_text()))
    assert drawn == given
    assert rows.keys() <= set(drawn)


def like_imagenet(folder):
    """A tiny folder of the benchmarks' images."""
    script = FOLDER / "imagenet_like.py"
    subprocess.run([sys.executable, script, folder, "--train=80", "--val=20", "--side=60"], check=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return like_imagenet(tmp_path_factory.mktemp("like") / "set")


def test_ours_and_timm_s_rates_and_their_ratio_are_printed(folder, capsys):
    threads = torch.get_num_threads()
    loading.main([str(folder), "--images=64", "--rounds=1"])
    assert torch.get_num_threads() == threads  # though it measures on one
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"^  (\S.*?)  +(\d+) +[\d.]+$", printed, re.MULTILINE))
    assert len(rows) == 3
    assert next(iter(rows)).startswith("timm ")
    assert all(int(rate) > 0 for rate in rows.values())
    ours = re.search(r"^  linvit +(\d+) +([\d.]+)$", printed, re.MULTILINE)
    assert float(ours[2]) == pytest.approx(int(ours[1]) / int(next(iter(rows.values()))), rel=0.05)
