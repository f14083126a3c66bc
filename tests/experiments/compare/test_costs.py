"""What the models of runs cost."""

import linvit
from linvit.experiments.compare.costs import Costs, measure
from linvit.experiments.compare.runs import Run
from tests.experiments.compare.runs import write_run


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
