"""Runs of up to 1,024 ranks, of which one is here: who writes files, and what is exchanged how often."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import one_rank
from tests.cli.forked import Forked
from tests.cli.runs import files

pytestmark = pytest.mark.skipif(not one_rank.HAS_RESULTS, reason="torch has no results of fake reductions")
SHORT = [
    *("--trainer.accelerator=cpu", "--trainer.strategy=ddp", "--trainer.max_epochs=1", "--trainer.callbacks=[]"),
    *("--trainer.limit_train_batches=3", "--trainer.limit_val_batches=2", "--trainer.enable_progress_bar=False"),
    "--trainer.enable_model_summary=False",
    *("--data.batch_size=2", "--data.num_workers=0", "--model.warmup_steps=1"),
]
SCENES = ["--data.img_size=32", "--data.scenes.train=6150", "--data.scenes.val=4100"]
TINY = "depths: [1, 1, 1, 1], embed_dims: [8, 16, 24, 32], sr_ratios: [1, 1, 1, 1], num_heads: [1, 1, 1, 1]"
SCENES.append(f"--model.backbone={{name: pvt_v2_b0, {TINY}}}")
RUNS = [("quickstart", 64)]
MORE = [("quickstart", 8), ("segmentation_quickstart", 1024), ("detection_quickstart", 1024)]
RUNS += [pytest.param(*run, marks=pytest.mark.slow) for run in MORE]
# each of 64 ranks has two images or three of validation
OPTIONS = {"quickstart": ["--model.backbone={name: deit_nano, depth: 1}", "--data.batch_size=1"]}


def exchanged(folder: Path, rank: int, world: int, config: str) -> dict[str, Any]:
    """What a rank exchanges in a run with three steps, a validation and a checkpoint."""
    arguments = ["fit", f"--config={config}", *SHORT, *OPTIONS.get(config, SCENES)]
    process = Forked(lambda: one_rank.run(rank, world, folder, *arguments), folder, folder / "said", dict(os.environ))
    os.waitpid(process.pid, 0)
    found = folder / f"{rank}-of-{world}.json"
    assert found.exists(), (folder / "said").read_text()[-2000:]
    return json.loads(found.read_text())


@pytest.mark.parametrize(("config", "most"), RUNS)
def test_ranks(tmp_path, config, most):
    few = exchanged(tmp_path, 0, 2, config)
    written = files(tmp_path / "0-of-2")
    many = exchanged(tmp_path, most - 1, most, config)
    assert few["steps"] == many["steps"]
    loss, *gradient, signal = few["steps"][-1]  # the loss in steps that are logged, and in the last of an epoch
    assert loss == ["allreduce_", 4]
    # DDP's buckets of the gradient, and where there is BatchNorm its statistics
    assert {name for name, _ in gradient} <= {"allreduce_", "broadcast_"}
    assert len(gradient) == {"quickstart": 1, "segmentation_quickstart": 4, "detection_quickstart": 2}[config]
    assert signal == ["allreduce_", 8]
    # DDP compares the numbers of parameters when it starts; nothing else grows with the ranks
    grown = [pair for pair in zip(few["others"], many["others"], strict=True) if pair[0] != pair[1]]
    assert grown == [(["allgather_", 8 * 3], ["allgather_", 8 * (most + 1)])]
    assert files(tmp_path / f"{most - 1}-of-{most}") == []
    assert files(tmp_path / "0-of-2") == written
