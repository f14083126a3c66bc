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
import yaml

import linvit
from benchmarks import loading
from tests.golden_files import Golden, of_case
from tests.helpers import perturb

FOLDER = Path(__file__).parents[1] / "benchmarks"
PICTURE = FOLDER.parent / "docs" / "linearized.svg"


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


def test_recall_keeps_the_rates_of_the_fewest_pairs_and_its_page_has_a_column_per_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(tmp_path)
    import recall

    titles = "variant,model.lr,mean,standard_deviation,seeds,state_bytes,rank"
    tables = {
        "diagnostics-rates": ["xca,0.001,0.9,0.05,3,,", "focused,0.004,1,0,3,,"],
        "diagnostics": ["xca-pairs32,,0.3,0.1,3,1024,", "focused-pairs32,,0.5,0.2,3,1024,64"],
    }

    def linvit(command: list[str]) -> int:
        """Stands in for the comparisons, of which it writes the tables."""
        name = next(option.removeprefix("--name=") for option in command if option.startswith("--name="))
        folder = tmp_path / "checkpoints/compare" / name
        folder.mkdir(parents=True)
        (folder / "table.csv").write_text("\n".join([titles, *tables[name]]), encoding="utf-8")
        return 0

    monkeypatch.setattr(recall, "linvit", linvit)
    rows = recall.compare("xca,focused", [8, 32], 3, 2)
    grid = yaml.safe_load((recall.FOLDERS[0] / "more_pairs.yaml").read_text(encoding="utf-8"))
    assert grid["variants"]["focused"] == {"model.attention": "focused", "model.lr": 0.004}
    assert grid["vary"] == {"data.pairs": [32]}
    page = recall.page(rows, "device: cpu")
    wanted = [
        "attention||8 pairs|32 pairs|rate|state (KiB)|rank",
        "focused|C|1.000 ± 0.000|0.500 ± 0.200|0.004|1.0|64.0",
    ]
    table = [line.strip("| ").replace(" | ", "|") for line in page.splitlines() if line.startswith("|")]
    assert table[0].replace("  ", "") == wanted[0]
    assert table[2:] == [wanted[1], "xca||0.900 ± 0.050|0.300 ± 0.100|0.001|1.0|-"]
    assert "PAIRS=8,32 SEEDS=3`; device: cpu" in page
    assert {"focused", "xca", "32 pairs"} <= set(re.findall(r">([a-z0-9].*?)</text>", recall.picture(rows)))


def like_imagenet(folder):
    """A tiny folder of the benchmarks' images."""
    script = FOLDER / "imagenet_like.py"
    subprocess.run([sys.executable, script, folder, "--train=80", "--val=20", "--side=60"], check=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return like_imagenet(tmp_path_factory.mktemp("like") / "set")


def test_the_folder_has_twenty_classes_and_is_the_same_every_time(folder, tmp_path):
    files = sorted(folder.rglob("*.jpg"))
    assert len(files) == 100
    assert len(list((folder / "train").iterdir())) == len(list((folder / "val").iterdir())) == 20
    again = like_imagenet(tmp_path / "again")
    for file in files:
        assert (again / file.relative_to(folder)).read_bytes() == file.read_bytes()


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
