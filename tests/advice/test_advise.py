"""`linvit advise` on real networks with a clock that turns by what they call."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import linvit
from linvit.advice import advise as advising
from linvit.cli import main


class Clock:
    """Passes a second per reading, and as many as planted whenever a network calls softmax attention."""

    def __init__(self, monkeypatch, planted):
        self.now, self.original = 0.0, F.scaled_dot_product_attention

        def attention(q, k, v, *args, **kwargs):
            self.now += planted
            return self.original(q, k, v, *args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", attention)

    def __call__(self):
        self.now += 1
        return self.now


@pytest.fixture
def nano():
    return linvit.create_backbone({"name": "deit_nano", "depth": 6}, img_size=32)


def test_softmax_that_costs_half_of_the_time_pays(monkeypatch, nano):
    clock = Clock(monkeypatch, 1.0)
    advice = linvit.advise(nano, img_size=(32, 48), attention=["linear", "hydra"], clock=clock, threads=1, minutes=100)
    assert advice.verdict.answer == "yes"
    assert advice.verdict.from_size == (32, 32)
    names = [row.name for row in advice.sizes[0].rows]
    assert {"linear in all 6 blocks", "linear, last 2 of 6 softmax", "hydra, last 3 of 6 softmax"} <= {*names}
    assert [row.softmax_blocks for row in advice.sizes[0].rows if row.name.startswith("hydra")] == [0, 2, 3]
    assert "linvit.replace_attention(model, [" in advice.commands()


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "pvt_v2_b0", "swin_tiny_patch4_window7_224"])
def test_hosts_run_through_to_an_honest_no(name, tmp_path):
    side = 64 if name.startswith("pvt") else 224
    ticks = iter(range(10**9))
    told = []
    advice = linvit.advise(name, side, clock=lambda: float(next(ticks)), threads=1, say=told.append)
    assert advice.verdict.answer == "no"
    assert "No attention can make it more than 15 % faster here" in advice.verdict.sentence
    assert told[0].startswith("counted, faster without attention: 1.")
    advice.write(tmp_path)
    found = json.loads((tmp_path / "advise.json").read_text())
    assert found["verdict"]["answer"] == "no"
    assert found["quality"] == "not measured"
    assert found["sizes"][0]["ceiling"]["now"]["seconds"] == [1.0] * 6
    assert "<svg" not in (tmp_path / "advise.html").read_text()  # it is embedded


class FixedSize(nn.Sequential):
    """A network for images of 32 x 32 alone."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * 32 * 32, 8))

    def forward(self, x):
        out = super().forward(x)[:, None, None]
        return F.scaled_dot_product_attention(out, out, out)


def test_a_training_step_of_a_module_that_calls_sdpa(monkeypatch):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layer, self.head = nn.Conv2d(3, 16, 8, 8), layer, nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.layer(self.embed(x).flatten(2).mT).mean(1))

    advice = linvit.advise(Tokens(), 32, mode="train", clock=Clock(monkeypatch, 1.0), threads=1)
    assert advice.intercepted
    assert advice.sizes[0].counted > 1
    assert advice.sizes[0].room.samples >= 6


def test_what_cannot_be_timed_is_refused(nano):
    with pytest.raises(linvit.UserError, match=r"no call of F.scaled_dot_product_attention \(0 calls\)"):
        linvit.advise("resnet18", 32)
    with pytest.raises(linvit.UserError, match="Did you mean 'vit_tiny_patch16_224'"):
        linvit.advise("vit_tiny_patch16_22")
    with pytest.raises(linvit.UserError, match="exported program"):
        linvit.advise("model.onnx")
    with pytest.raises(linvit.UserError, match="FixedSize cannot take images of 48 x 48"):
        linvit.advise(FixedSize(), (32, 48))
    with pytest.raises(linvit.UserError, match="focsed"):
        linvit.advise(nano, 32, attention="focsed")


def test_ctrl_c_keeps_what_is_known(monkeypatch, nano):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(advising.Bench, "measure_ceiling", interrupted)
    advice = linvit.advise(nano, 32, threads=1)
    assert (advice.stopped, advice.verdict.answer) == ("interrupted", "undecided")
    assert "Counted: at most" in advice.verdict.sentence


def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert (
        main(["advise", "deit_nano", "--img_size", "32", "--threads", "1", "--minutes", "0.2", f"--output={tmp_path}"])
        == 0
    )
    out = capsys.readouterr().out
    assert "counted, faster without attention" in out
    assert "share of the ceiling's gain" in out
    assert (tmp_path / "advise.html").exists()
