"""What would fail on a GPU, and where the host would wait for it, on a CUDA device that is not there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.null_cuda.device import Server, build, missing
from tests.null_cuda.layers import DOCS, with_counts
from tests.null_cuda.rehearse import DETECTION_BATCH
from tests.one_rank import HAS_RESULTS

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

FIT = ["--trainer.accelerator=cuda", "--trainer.max_steps=4", "--trainer.log_every_n_steps=3", "--data.num_workers=0"]
MIXED = ["--model.mixup_alpha=0.8", "--model.cutmix_alpha=1", "--data.augmentation.random_erasing=0.5"]
MIXED += ["--data.augmentation.augment_on=device", "--data.augmentation.auto_augment=rand-m9-mstd0.5-inc1"]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(build(tmp_path_factory.mktemp("null_cuda")))
    yield started
    started.close()


def rehearsed(server: Server, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What the steps of a subject ask of the device."""
    code, said = server.run(folder / "calls", "rehearse", *arguments)
    assert code == 0, said[-3000:]
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_what_is_planted_is_found_and_a_checkpoint_waits_once(server, tmp_path):
    """For all of its tensors, and once to see that they are finite."""
    device, dtype, item, *convolutions, save, finite = rehearsed(server, tmp_path, "planted")
    assert [(step["error"], sum(step["waits"].values())) for step in (save, finite)] == [("", 1), ("", 1)]
    assert "found at least two devices, cuda:0 and cpu" in device["error"]
    assert "dtype" in dtype["error"]
    assert list(item["waits"].values()) == [1]
    assert next(iter(item["waits"])).startswith("rehearse.py:")
    few, many = [(step["error"], step["launches"]) for step in convolutions]
    assert few == many  # cuDNN takes all images at once, and torch's own kernels one by one


@pytest.mark.parametrize(("subject", "least"), [("mechanisms", 150), ("networks", 60), ("augmentation", 10)])
def test_no_step_waits(server, tmp_path, subject, least):
    found = rehearsed(server, tmp_path, subject)
    assert len(found) > least
    assert {step["name"]: step["error"] for step in found if step["error"]} == {}
    assert {step["name"]: step["waits"] for step in found if step["waits"]} == {}


def test_detectors_wait_a_few_times(server, tmp_path):
    """Numbers of boxes decide the sizes of what follows; each image has one that is found."""
    found = rehearsed(server, tmp_path, "detectors")
    assert not [step["error"] for step in found if step["error"]]
    waits = {step["name"]: sum(step["waits"].values()) for step in found}
    for name, count in waits.items():
        assert count <= (2 if name.endswith("training") else 3) * DETECTION_BATCH, waits


@pytest.mark.parametrize("mode", ["inference", pytest.param("train", marks=pytest.mark.slow)])
def test_advise_runs_to_its_end(server, tmp_path, mode):
    """Times mean nothing there."""
    options = [
        "vit_tiny_patch16_224",
        "--img_size=224",
        "--attention=linear",
        "--all",
        "--minutes=0.5",
        "--device=cuda",
    ]
    code, said = server.run(
        tmp_path / "calls", "rehearse", "advise", *options, f"--mode={mode}", f"--output={tmp_path}"
    )
    assert code == 0, said[-3000:]
    found = json.loads((tmp_path / "advise.json").read_text())
    rows = [*found["sizes"][0]["rows"], *found["sizes"][0]["ways"]]
    names = {row["name"] for row in rows if row["seconds"] and row["peak"] is not None}
    assert {"the unchanged network", "linear in all 12 blocks", "softmax, math, bfloat16"} <= names, said[-3000:]
    assert "driver" in found["conditions"]["device"]


@pytest.mark.parametrize(
    ("config", "options", "training", "logged", "validation"),
    [
        ("quickstart", [*MIXED, "--trainer.precision=16-mixed", "--trainer.gradient_clip_val=1"], 0, 1, 0),
        pytest.param("segmentation_quickstart", [], 0, 1, 0, marks=pytest.mark.slow),
        ("detection_quickstart", [], 8, 1, 4 * 8),
    ],
)
def test_training_and_validation(server, tmp_path, config, options, training, logged, validation):
    """With callbacks, progress bar, moving average and the guard against what is not finite."""
    found = rehearsed(server, tmp_path, "fit", config, *FIT, *options)
    steps, validations = ([step for step in found if step["name"] == kind] for kind in ("training", "validation"))
    *_, third, last = [sum(step["waits"].values()) for step in steps]  # the first ones set up
    assert last <= training, steps
    assert third <= training + logged, steps
    assert sum(validations[-1]["waits"].values()) <= validation, validations  # the first draws pictures


@pytest.mark.parametrize(
    ("steps", "strategy"),
    [
        pytest.param(
            1,  # then DDP asks rank 0 for the order of its buckets, and all values are 0
            ["--trainer.strategy=ddp"],
            marks=pytest.mark.skipif(not HAS_RESULTS, reason="torch has no results of fake reductions"),
            id="ddp",
        ),
        pytest.param(
            4,
            ["--config=base/strategy/fsdp", "--trainer.gradient_clip_val=null", "--model.ema_decay=null"],
            marks=pytest.mark.slow,
            id="fsdp",
        ),
    ],
)
def test_ranks_do_not_wait_for_the_device(server, tmp_path, steps, strategy):
    """Of eight ranks one is here; see `tests.one_rank`."""
    few = [
        f"--trainer.max_steps={steps}",
        "--data.batch_size=4",
        "--trainer.limit_val_batches=2",
        "--trainer.num_nodes=8",
        "--trainer.log_every_n_steps=100",
    ]
    more = ["--trainer.devices=1", "--trainer.callbacks=[]", "--attention_rank=false", "--model.predict_with=raw"]
    found = rehearsed(server, tmp_path, "fit", "quickstart", *FIT, *few, *more, *strategy)
    training = [step for step in found if step["name"] == "training"]
    assert len(training) == steps
    once = {"on_device.py", "execution.py"}  # what the first step sets up
    assert not [line for line in training[0]["waits"] if line.partition(":")[0] not in once]
    assert not any(step["waits"] for step in training[1:])


def test_the_table_of_docs_is_what_is_counted(server, tmp_path):
    """`python -m tests.null_cuda.layers --write` makes it."""
    names = ["linear", "pola"]
    code, said = server.run(tmp_path / "calls", "layers", *names)
    assert code == 0, said[-2000:]
    counted = with_counts(table := DOCS.read_text(encoding="utf-8"), said)
    assert [line for line in counted.splitlines() if line not in table] == []


@pytest.mark.slow
def test_memory_of_docs_is_what_is_counted(server, tmp_path):
    """`PYTHONPATH=src:. python benchmarks/recipe_memory.py` counts it."""
    code, said = server.run(tmp_path / "calls", "memory", "deit_small")
    assert code == 0, said[-2000:]
    assert said.splitlines()[-1] in DOCS.read_text(encoding="utf-8").splitlines()


def test_a_roofline_of_attention(server, tmp_path):
    """Bytes that can be added up by hand, and what they take at least."""
    name = "tests.null_cuda.rehearse:Sum"
    _, said = server.run(tmp_path / "calls", "rehearse", "roofline", name)
    assert "PREDICTED" in said, said[-2000:]
    own = next(
        line.split() for line in said.splitlines() if line.split()[:2] == ["tests.null_cuda.rehearse:Sum", "3,136"]
    )
    moved = 3 * 64 * 3136 * 96 * 2 / 1e9  # q and v are read, o is written
    assert own[2:5] == ["1", "+", "2"]
    assert float(own[5]) == pytest.approx(moved, rel=0.01)
    assert float(own[14]) == pytest.approx(moved / 3350 * 1e3, rel=0.01)
