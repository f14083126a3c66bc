"""What the models of runs cost."""

import math
import sys

import torch

import linvit
from linvit.experiments.bench import costs as bench
from linvit.experiments.compare.costs import Costs, measure
from linvit.runs.folder import RunFolder
from linvit.tasks import DetectionTask
from tests.experiments.compare.runs import write_run
from tests.families import narrow, small


class Fails(linvit.Attention):
    """As on a device whose memory is full."""

    def forward(self, q, k, v, grid):
        raise MemoryError("not enough")


def test_a_model_that_cannot_run_keeps_no_other_from_the_table(tmp_path):
    own = f"{__name__}:Fails"
    runs = {
        "softmax": RunFolder(write_run(tmp_path / "softmax-seed0/version_0")),
        "fails": RunFolder(write_run(tmp_path / "fails-seed0/version_0", attention=own)),
        "unknown": RunFolder(write_run(tmp_path / "unknown-seed0/version_0", attention="nothing")),
    }
    found = measure(runs, budget=0.05, device="cpu")
    assert "not enough" in found["fails"]
    assert "nothing" in found["unknown"]
    costs = found["softmax"]
    assert isinstance(costs, Costs)
    network = linvit.create_backbone("deit_nano", attention="softmax", num_classes=10, img_size=32)
    assert costs.numbers["parameters"] == sum(parameter.numel() for parameter in network.parameters())
    assert all(costs.numbers[name] > 0 for name in ("macs", "memory_bytes", "latency_seconds"))
    assert costs.numbers["softmax_blocks"] == 4
    assert costs.numbers["latency_low"] <= costs.numbers["latency_seconds"] <= costs.numbers["latency_high"]
    assert (
        costs.numbers["state_bytes"] == 4 * 2 * 64 * 96 * 4
    )  # four layers keep keys and values of 96 channels and 64 tokens


def test_a_student_is_timed_beside_its_teacher_at_several_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "TIMES", (1, 2))
    monkeypatch.setattr(bench, "LONGEST", float("inf"))
    teacher = {"source": None}
    run = RunFolder(write_run(tmp_path / "linear-seed0/version_0", attention="linear", teacher=teacher))
    found = measure({"linear": run}, budget=0.05, device="cpu", teachers={"linear": "teacher"})
    assert found["teacher"].crossover is None
    met = found["linear"].crossover
    assert met.measured == (32, 64)
    assert met.size in (0.0, math.inf) or 32 < met.size < 64
    image = torch.zeros(3, 32, 32)
    networks = {name: linvit.create_backbone("deit_nano", img_size=32) for name in ("one", "other")}
    costs = bench.costs_by_size(networks, image, torch.device("cpu"), 0.05)
    assert [(cost.name, cost.size) for cost in costs] == [
        *(("one", (32, 32)), ("other", (32, 32))),
        *(("one", (64, 64)), ("other", (64, 64))),
    ]
    assert all(cost.peak["forward"] and cost.seconds["forward"].samples for cost in costs)


def test_a_detector_has_something_to_find_when_it_trains():
    """Its losses need boxes, and so does the time of a step."""
    task = DetectionTask(backbone=small("pvt_v2_b0"), head=narrow("mask_rcnn"), num_classes=3, img_size=64)
    module, images = task.measurable_network(), torch.randn(2, 3, 64, 64)
    module.train()(images).backward()
    assert all(parameter.grad is not None for parameter in task.network.parameters())
    assert len(module.eval()(images)) == 2


def test_a_report_of_other_peoples_runs_imports_and_calls_nothing(tmp_path, monkeypatch):
    """What `linvit compare --report` reads; in `linvit compare` the configurations are the user's own."""
    (tmp_path / "module_of_a_run.py").write_text("from linvit.tasks import ClassificationTask as Mine\n")
    (tmp_path / "hubconf.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    hub = {"repo_or_dir": str(tmp_path), "model": "x", "source": "local"}
    runs = {
        "import": RunFolder(write_run(tmp_path / "a/version_0", task="module_of_a_run.Mine")),
        "call": RunFolder(write_run(tmp_path / "b/version_0", task="torch.hub.load", **hub)),
        "attention": RunFolder(write_run(tmp_path / "c/version_0", attention="module_of_a_run:Mine")),
    }
    found = measure(runs, budget=0.05, device="cpu", imports=False)
    assert "not a task that is imported already" in found["import"]
    assert "not a task that is imported already" in found["call"]
    assert "the attention class 'module_of_a_run:Mine'" in found["attention"]
    assert "module_of_a_run" not in sys.modules
    assert not (tmp_path / "mark").exists()
