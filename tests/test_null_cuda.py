"""What would fail on a GPU, and where the host would wait for it, on a CUDA device that is not there."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.null_cuda.device import build, missing, run
from tests.null_cuda.rehearse import DETECTION_BATCH

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

FIT = ["--trainer.accelerator=cuda", "--trainer.max_steps=4", "--trainer.log_every_n_steps=100", "--data.num_workers=0"]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("null_cuda"))


def rehearsed(library: Path, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What the steps of a subject ask of the device."""
    done = run(library, folder / "calls", ["-m", "tests.null_cuda.rehearse", *arguments])
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_what_is_planted_is_found(library, tmp_path):
    device, dtype, item = rehearsed(library, tmp_path, "planted")
    assert "found at least two devices, cuda:0 and cpu" in device["error"]
    assert "dtype" in dtype["error"]
    assert list(item["waits"].values()) == [1]
    assert next(iter(item["waits"])).startswith("rehearse.py:")


@pytest.mark.parametrize("subject", ["mechanisms", "networks"])
def test_no_step_waits(library, tmp_path, subject):
    found = rehearsed(library, tmp_path, subject)
    assert len(found) > 40
    assert not [step["error"] for step in found if step["error"]]
    assert {step["name"]: step["waits"] for step in found if step["waits"]} == {}


def test_detectors_wait_a_few_times(library, tmp_path):
    """Boxes that overlap are found in turn, image by image, and their numbers decide the sizes of what follows."""
    found = rehearsed(library, tmp_path, "detectors")
    assert not [step["error"] for step in found if step["error"]]
    waits = {step["name"]: sum(step["waits"].values()) for step in found}
    for name, count in waits.items():
        of_image = 2 if name.endswith("training") else 6 if name.startswith("cascade") else 4
        assert count <= of_image * DETECTION_BATCH + 8, waits


@pytest.mark.parametrize(
    ("config", "most"), [("quickstart", 0), ("segmentation_quickstart", 0), ("detection_quickstart", 5 * 8)]
)
def test_training_and_validation(library, tmp_path, config, most):
    """With callbacks, progress bar, moving average and the guard against what is not finite."""
    found = rehearsed(library, tmp_path, "fit", config, *FIT)
    for kind in ("training", "validation"):
        last = [step for step in found if step["name"] == kind][-1]  # the first ones set up and draw pictures
        assert sum(last["waits"].values()) <= most, last
