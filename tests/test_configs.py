"""Every experiment under configs/: its opening comment, that it runs, and that what is saved of it is the same."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from linvit.cli.training import VERBS
from linvit.runs.configs import find, names, text
from tests.cli.runs import files, flags, linvit
from tests.data.images import picture, save

ROOT = Path(__file__).parent.parent
CONFIGS = {f"configs/{name}.yaml": yaml.load(text(ROOT / f"configs/{name}.yaml"), yaml.CSafeLoader) for name in names()}
FRAGMENTS = sorted(name for name in CONFIGS if name.startswith("configs/base/"))
GRIDS = {name: content for name, content in CONFIGS.items() if name.startswith("configs/ablations/")}
EXPERIMENTS = sorted(CONFIGS.keys() - set(FRAGMENTS) - set(GRIDS))
IMAGENET = [name for name in EXPERIMENTS if name.startswith("configs/imagenet/")]
ADE20K = [name for name in EXPERIMENTS if name.startswith("configs/ade20k/")]
COCO = [name for name in EXPERIMENTS if name.startswith("configs/coco/")]
REMOTE_SENSING = [name for name in EXPERIMENTS if name.startswith("configs/remote_sensing/")]
SMALL = flags(data__batch_size=2, data__num_workers=0, trainer__accelerator="cpu", trainer__devices=1)
DIGITS = flags(data__source="digits", data__img_size=64)  # in place of ImageNet
SCENES = flags(data__source="digit_scenes", data__img_size=64, data__reduce_zero_label=False)
BOXES = flags(data__source="digit_scenes", data__img_size=64, data__resize_limits="[64, 64]")
LINEARIZE = [name for name in EXPERIMENTS if name.startswith("configs/linearize/")]
FROZEN = [name for name in EXPERIMENTS if name.startswith("configs/frozen/")]
UNTRAINED = ["--stages=null", "--data.img_size=112"]  # sides that 14 and 16 divide
DIAGNOSTICS = [name for name in EXPERIMENTS if name.startswith("configs/diagnostics/")]
SMALLEST = {
    "recall",
    "pvt_v2_b0_retinanet_1x",
    "macunet_whdld",
    "pvt_tiny_semantic_fpn",
    "deit_tiny",
    "flatten_pvt_v2_b0",
    *("quickstart", "teacher", "deit_tiny"),
}


def heading(name):
    """The fields of the opening comment: `# Paper: ...`, a field may continue in the next lines."""
    comment = re.match(r"(#.*\n)+", text(ROOT / name))
    assert comment, f"{name} does not open with a comment"
    lines = [line.removeprefix("#").strip() for line in comment[0].splitlines()]
    fields = re.findall(r"(\w+):\s+(.*?)(?=\n\w+:\s|\Z)", "\n".join(lines), re.DOTALL)
    return {key: " ".join(value.split()) for key, value in fields}


def printed(*arguments, cwd):
    """The configuration that a command line amounts to."""
    done = linvit("fit", *arguments, "--print_config", cwd=cwd)
    assert done.code == 0, done.err
    return yaml.load(done.out, yaml.CSafeLoader)


def bases(content):
    """Files that a configuration starts from."""
    named = content.get("base", [])
    return {find(base) for base in ([named] if isinstance(named, str) else named)}


def slow_unless_small(name):
    every = IMAGENET + ADE20K + COCO + REMOTE_SENSING + LINEARIZE + FROZEN + DIAGNOSTICS
    big = name in every and Path(name).stem not in SMALLEST
    return pytest.param(name, marks=pytest.mark.slow) if big else name


def test_every_fragment_is_part_of_an_experiment_or_says_how_to_add_it():
    used = {path for content in CONFIGS.values() for path in bases(content)}
    used |= {
        find(config) for grid in GRIDS.values() if isinstance(grid.get("config"), list) for config in grid["config"]
    }
    added = (
        "configs/base/strategy/",
        "configs/base/data/",
        "configs/base/linearize",
    )  # to any experiment, on the command line, by its verb
    assert not [name for name in FRAGMENTS if ROOT / name not in used and not name.startswith(added)]


def test_a_recipe_is_understood_from_itself_and_one_base():
    assert not [name for name in FRAGMENTS if bases(CONFIGS[name])]
    assert not [name for name in EXPERIMENTS if len(bases(CONFIGS[name])) > 1]
    named = {base.relative_to(ROOT).as_posix() for name in EXPERIMENTS for base in bases(CONFIGS[name])}
    assert not [base for base in named if bases(CONFIGS[base])]


def test_every_experiment_opens_with_paper_command_and_expected_number():
    for name in EXPERIMENTS:
        fields = heading(name)
        assert fields.keys() >= {"Paper", "Command"}, name
        assert re.search(r"\b(19|20)\d\d\b", fields["Paper"]), f"{name}: no year"
        if name in IMAGENET + ADE20K + COCO and (ROOT / name).is_file():
            assert "Expected" not in fields, f"{name}: what is published stands in linvit's tables"
        else:
            assert re.search(r"\d|not yet run", fields["Expected"]), name
        program, verb, *arguments = shlex.split(fields["Command"])
        assert (program, verb in (*VERBS, "linearize")) == ("linvit", True), name
        assert find(arguments[arguments.index("--config") + 1]) == ROOT / name


def printed_by_its_command(name, cwd):
    """The configuration that the command of an experiment's heading amounts to."""
    return printed(*shlex.split(heading(name)["Command"])[2:], cwd=cwd)


@pytest.mark.parametrize(
    "name",
    [
        slow_unless_small(name) if name in COCO + ADE20K + DIAGNOSTICS else name
        for name in EXPERIMENTS
        if name not in IMAGENET or Path(name).stem in SMALLEST  # test_recipes.py reads the others
    ],
)
def test_its_command_is_understood_and_what_is_printed_of_it_reads_the_same(name, tmp_path):
    once = printed_by_its_command(name, tmp_path)
    if isinstance(slow_unless_small(name), str):
        (tmp_path / "saved.yaml").write_text(yaml.safe_dump(once))
        assert printed("--config=saved.yaml", cwd=tmp_path) == once


def photos(folder):
    """Flags for a folder of JPEGs of odd sizes."""
    for seed, (width, height) in enumerate([(37, 211), (140, 90), (33, 33), (301, 57)] * 2):
        save(picture(seed, width, height), folder / "ab"[seed % 2] / f"{seed}.jpg")
    return flags(data__source=folder, data__img_size=64)


def tiles(folder, name):
    """Flags for a folder of tiles with masks, in place of aerial images, and for no download."""
    labels = np.arange(64 * 64, dtype=np.uint8).reshape(64, 64) % 5 + 1
    if colours := CONFIGS[name]["data"]["init_args"].get("mask_values"):
        labels = np.array(colours, np.uint8)[labels]
    for split in ("train", "val"):
        for seed in range(2):
            save(picture(seed, 64, 64), folder / split / "images" / f"{seed}.png")
            save(Image.fromarray(labels), folder / split / "masks" / f"{seed}.png")
    weights = ["--model.backbone.pretrained=false"] if "maresunet" in name else []
    return [*flags(data__source=folder, data__img_size=64), *weights]


@pytest.mark.parametrize("name", [*map(slow_unless_small, EXPERIMENTS)])
def test_it_runs(name, tmp_path, monkeypatch):
    for loading in ("timm.models._builder.load_pretrained", "linvit.backbones.timm.model._check_weights"):
        monkeypatch.setattr(loading, lambda *_, **__: None)  # nothing is downloaded
    data = (
        DIGITS
        if name in IMAGENET
        else SCENES
        if name in [*ADE20K, "configs/masks.yaml"]
        else BOXES
        if name in [*COCO, "configs/coco.yaml"]
        else tiles(tmp_path.with_suffix(".tiles"), name)
        if name in REMOTE_SENSING
        else photos(tmp_path.with_suffix(".photos"))
        if "images" in name
        else ["--model.teacher=null"]  # which is trained first: see tests/cli/test_linearize.py
        if "linearize/quickstart" in name
        else SCENES
        if "linearize/ade20k" in name
        else [*SCENES, "--model.backbone.pretrained=false"]
        if name in FROZEN
        else ["--data.source=digits", *UNTRAINED]
        if name in LINEARIZE and "teacher" not in name
        else []
    )
    done = linvit("fit", f"--config={ROOT / name}", "--trainer.fast_dev_run=true", *SMALL, *data, cwd=tmp_path)
    assert done.code == 0, done.err
    assert not [file for file in files(tmp_path) if file.endswith((".ckpt", ".yaml"))]
