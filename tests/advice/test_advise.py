"""`linvit advise` on real networks with a clock that turns by what they call."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

import linvit
from linvit.advice import advise as advising
from linvit.advice import ceiling, comparison, softmax
from linvit.advice.bench import TURNS, Bench, Way
from linvit.advice.subject import find_subject
from linvit.cli import main
from linvit.experiments.bench.runner import Settings
from tests.families import narrow, small


class Clock:
    """Passes a second per reading, and as many as planted whenever a network calls softmax; tenfold by "math"."""

    def __init__(self, monkeypatch, planted):
        self.now, self.original = 0.0, F.scaled_dot_product_attention

        def attention(q, k, v, *args, **kwargs):
            self.now += planted if torch.backends.cuda.flash_sdp_enabled() else 10 * planted  # else SDPBackend.MATH
            return self.original(q, k, v, *args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
        monkeypatch.setattr(ceiling, "SDPA", attention)

    def __call__(self):
        self.now += 1
        return self.now


@pytest.fixture
def nano():
    return linvit.create_backbone({"name": "deit_nano", "depth": 6}, img_size=32)


def test_softmax_that_costs_half_of_the_time_pays(monkeypatch, nano):
    clock = Clock(monkeypatch, 1.0)
    advice = linvit.advise(nano, img_size=32, attention=["linear", "hydra"], clock=clock, threads=1, minutes=100)
    assert advice.verdict.answer == "yes"
    assert advice.verdict.from_size == (32, 32)
    names = [row.name for row in advice.sizes[0].rows]
    assert {"linear in all 6 blocks", "linear, last 2 of 6 softmax", "hydra, last 3 of 6 softmax"} <= {*names}
    assert [row.softmax_blocks for row in advice.sizes[0].rows if row.name.startswith("hydra")] == [0, 2, 3]
    assert "linvit.replace_attention(model, 'linear', img_size=32)" in advice.commands()
    assert advice.commands().endswith("# train it: docs/guides/linearize.md")
    advice.subject.teacher, advice.subject.own = "timm:vit", (24, 24)
    train = "--teacher timm:vit --data.source=IMAGES --model.attention=linear --data.img_size=32"
    assert advice.commands().endswith(f"# train it: linvit linearize {train}")
    advice.subject.several_sizes = True
    assert advice.commands().endswith(f"{train} --data.token_budget=null --data.max_tokens=null")


def test_layouts_are_measured_and_jetvit_is_shown(monkeypatch):
    """A depth that JetViT lists full blocks for, on a grid of more than one window."""
    for module in (comparison, softmax):
        monkeypatch.setattr(module, "MOST_TURNS", TURNS)
    deit = linvit.create_backbone({"name": "deit_nano", "depth": 12, "patch_size": 2}, img_size=32)
    options = {"clock": Clock(monkeypatch, 1.0), "threads": 1, "all_sizes": True}
    given = ["linear", {"layout": "first_half", "linear": "hydra"}]
    with pytest.raises(linvit.UserError, match="layout 'jetvit' lists its full blocks"):
        linvit.advise("deit_nano", 32, attention={"layout": "jetvit"}, **options)
    advice = linvit.advise(deit, 32, attention=given, **options)
    rows = {row.name: row for row in advice.sizes[0].rows}
    assert rows["softmax in windows, 4 global blocks"].softmax_blocks == 4
    assert rows["linear, windows and softmax, layout jetvit"].softmax_blocks == 2
    assert rows["linear, windows and softmax, layout jetvit"].attention[1] == {"name": "window", "window_size": 8}
    layout = rows["layout first_half {linear: hydra}"]
    assert (layout.attention, layout.softmax_blocks) == ([None] * 6 + ["hydra"] * 6, 6)


def test_sizes_have_equal_time_and_slow_ways_are_measured_once(monkeypatch, nano):
    clock, given = Clock(monkeypatch, 1.0), []

    class Comparison(comparison.Comparison):
        def __init__(self, bench, size, way, seconds):
            super().__init__(bench, size, way, seconds)
            given.append(seconds / bench.left)
            assert way.backend is None

        def add_rivals(self, ways, intercepted):
            assert [len(row.seconds) for row in ways[1:]] == [1] * (self.size.img_size == (32, 32))  # math

        def take_turns(self):
            """Takes none."""

    monkeypatch.setattr(advising, "Comparison", Comparison)
    monkeypatch.setattr(softmax, "find_ways", lambda bench, size, compiled: [Way(SDPBackend.MATH)])
    advice = linvit.advise(nano, (32, 40, 48), attention="linear", clock=clock, threads=1, minutes=100)
    assert given == pytest.approx([1 / 3, 1 / 2, 1], rel=0.05)
    assert (
        len([note for note in advice.all_notes() if "softmax, math: left out, since at 32 x 32 it took" in note]) == 2
    )


def test_a_size_keeps_to_its_time(monkeypatch, nano):
    """Of three mechanisms one is measured in all blocks, and the others are named."""
    clock = Clock(monkeypatch, 1.0)
    monkeypatch.setattr(Bench, "pace", property(lambda self: 100.0, lambda self, value: None), raising=False)
    monkeypatch.setattr(Bench, "least", lambda self, size: 0.0)
    specs = ["linear", "hydra", "efficient"]
    advice = linvit.advise(nano, 32, attention=specs, clock=clock, threads=1, minutes=20)
    rows = [row.name for row in advice.sizes[0].rows if row.kind == "mechanism"]
    assert len(rows) == 1
    assert any("32 x 32: no time for 9 rows" in note for note in advice.all_notes())  # one is of fewer pixels


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "pvt_v2_b0"])
def test_hosts_run_through_to_an_honest_no(name, tmp_path):
    ticks = iter(range(10**9))
    told = []
    advice = linvit.advise(name, 64, clock=lambda: float(next(ticks)), threads=1, say=told.append)
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
    """The mode that takes attention out costs time for each operator: the unchanged network runs in one, too."""
    layer, modes = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), []

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layer, self.head = nn.Conv2d(3, 16, 8, 8), layer, nn.Linear(16, 4)

        def forward(self, x):
            modes.append(torch._C._len_torch_function_stack())
            return self.head(self.layer(self.embed(x).flatten(2).mT).mean(1))

    advice = linvit.advise(Tokens(), 32, mode="train", clock=Clock(monkeypatch, 1.0), threads=1)
    assert advice.intercepted
    assert advice.sizes[0].counted > 1
    assert advice.sizes[0].room.samples >= 6
    assert modes.index(0) > 2 * 6  # turns of the network and of its ceiling


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


def test_blocks_of_a_network_without_softmax_are_not_called_softmax(monkeypatch):
    for module in (comparison, softmax):
        monkeypatch.setattr(module, "MOST_TURNS", TURNS)
    focused = linvit.create_backbone({"name": "deit_nano", "depth": 5}, "focused", img_size=32)
    options = {"clock": Clock(monkeypatch, 1.0), "threads": 1, "all_sizes": True}
    advice = linvit.advise(focused, 32, attention="linear", **options)
    rows = {row.name: row.softmax_blocks for row in advice.sizes[0].rows}
    assert rows["linear, last 2 of 5 unchanged"] == rows["the unchanged network"] == 0
    assert rows["softmax, fused"] == 5
    assert "the unchanged network has FocusedAttention; counted is as if it had softmax attention" in advice.notes


def test_a_detector_is_counted_on_the_cpu():
    """It reads which boxes it has found, which tensors without values cannot tell."""
    detector = linvit.create_detector(small("pvt_v2_b0"), narrow("faster_rcnn"), 3, img_size=64)
    bench = Bench(find_subject(detector), Settings(), limit=60, clock=lambda: 0.0)
    assert bench.count((64, 64)).cores > 0


@pytest.mark.parametrize("at", [0, 9])
def test_ctrl_c_keeps_what_is_known(monkeypatch, nano, at):
    """Before anything is timed, and in the first turn of the comparison."""
    rounds, original = [], Bench.round

    def interrupted(bench, turns, rows, what):
        if len(rounds) == at:
            raise KeyboardInterrupt
        rounds.append(what)
        original(bench, turns, rows, what)

    monkeypatch.setattr(Bench, "round", interrupted)
    advice = linvit.advise(nano, 32, attention="linear", clock=Clock(monkeypatch, 1.0), threads=1)
    assert (advice.stopped, advice.verdict.answer) == ("interrupted", "room" if at else "undecided")
    assert ("Counted: at most" in advice.verdict.sentence) == (not at)
    assert [row.kind for row in advice.sizes[0].ceiling.values()] == ["now", "ceiling"] * bool(at)
    assert "nan" not in str(advice)


def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert (
        main(["advise", "deit_nano", "--img_size", "32", "--threads", "1", "--minutes", "0.2", f"--output={tmp_path}"])
        == 0
    )
    out = capsys.readouterr().out
    assert "counted, faster without attention" in out
    assert "share of the ceiling's gain" in out
    main(["advise", "deit_nano", "--img_size", "32", "--threads", "1", "--minutes", "0.001", f"--output={tmp_path}"])
    assert "(stopped after 0.001 minutes: the table has the results so far)" in capsys.readouterr().out
    assert (tmp_path / "advise.html").exists()
