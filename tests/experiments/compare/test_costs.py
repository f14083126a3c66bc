"""What the models of runs cost."""

import linvit
from linvit.experiments.compare.costs import Costs, _with_images, measure
from linvit.experiments.compare.runs import Run
from tests.experiments.compare.runs import write_run
from tests.families import narrow, small


class Fails(linvit.Attention):
    """As on a device whose memory is full."""

    def forward(self, q, k, v, grid):
        raise MemoryError("not enough")


def test_a_model_that_cannot_run_keeps_no_other_from_the_table(tmp_path):
    own = f"{__name__}:Fails"
    runs = {
        "softmax": Run(write_run(tmp_path / "softmax-seed0/version_0")),
        "fails": Run(write_run(tmp_path / "fails-seed0/version_0", attention=own)),
        "unknown": Run(write_run(tmp_path / "unknown-seed0/version_0", attention="nothing")),
    }
    found = measure(runs, budget=0.05, device="cpu")
    assert "not enough" in found["fails"]
    assert "nothing" in found["unknown"]
    costs = found["softmax"]
    assert isinstance(costs, Costs)
    network = linvit.create_backbone("deit_nano", attention="softmax", num_classes=10, img_size=32)
    assert costs.parameters == sum(parameter.numel() for parameter in network.parameters())
    assert costs.macs > 0
    assert costs.memory > 0
    assert costs.latency.median > 0


def test_a_detector_has_something_to_find_when_it_trains():
    """Its losses need boxes, and so does the time of a step."""
    detector = linvit.create_detector(small("pvt_v2_b0"), narrow("mask_rcnn"), num_classes=3)
    module, images, _ = _with_images(detector, "cpu", (64, 64))
    module.train()(*images).backward()
    assert all(parameter.grad is not None for parameter in detector.parameters())
    assert len(module.eval()(*images)) == 2
