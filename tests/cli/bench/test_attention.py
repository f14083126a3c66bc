"""`linvit bench attention`: tables, files, plots; what cannot be measured is a row, Ctrl-C keeps what is measured."""

import csv
import re

import pytest
import torch

import linvit
from linvit.cli import bench, main
from linvit.cli.bench import costs as verbs
from linvit.experiments.bench import costs
from linvit.experiments.measure import interleaved
from linvit.io import machine

QUICK = ["--grids=4,4x8,8", "--budget=0.05", "--dim=8", "--heads=2"]


@pytest.fixture(autouse=True)
def _own_threads(monkeypatch):
    monkeypatch.setattr("linvit.cli.bench.costs.keep_memory", lambda: None)
    monkeypatch.setattr("linvit.cli.bench.costs.processor_share", lambda: 1.0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def undrawn(monkeypatch):
    """Plots are blank: drawing five takes as long as measuring, and `test_tables_...` looks at them."""
    monkeypatch.setattr("linvit.experiments.bench.report.line_plot", lambda *_: "")


def rows_of(folder):
    with (folder / "costs.csv").open(encoding="utf-8") as file:
        return {(row["name"], int(row["amount"])): row for row in csv.DictReader(file)}


def test_tables_crossovers_exponents_files_and_plots(tmp_path, capsys):
    specs = ["linear", "{name: focused, focusing_factor: 4}"]
    assert main(["bench", "attention", *specs, *QUICK, "--threads=1", "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    names = ["linear", "focused {focusing_factor: 4}", "torch's SDPA", "naive softmax"]
    for name in names:
        assert len(re.findall(rf"^  {re.escape(name)}(  |$)", printed, re.MULTILINE)) >= 6  # five costs and exponents
    assert "half of the sizes (tokens N) at which a module was measured" in " ".join(printed.split())
    for fact in ("threads: 1", "load: ", "versions: linvit ", "date: "):
        assert fact in printed
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 12
    row = rows["linear", 32]
    assert (row["height"], row["width"], row["note"]) == ("4", "8", "")
    assert float(row["forward_seconds_low"]) <= float(row["forward_seconds"]) <= float(row["forward_seconds_high"])
    assert int(row["forward_samples"]) >= 3
    cost = linvit.analysis.operations.attention_cost("linear", linvit.Grid((4, 8)), dim=8, num_heads=2)
    assert int(row["macs"]) == cost.matmul
    assert int(row["flops"]) == 2 * cost.matmul + cost.elementwise
    text = (tmp_path / "out" / "costs.md").read_text(encoding="utf-8")
    exponents = text.partition("## Growth exponents")[2]
    heads, fits = (re.search(rf"^\| {name} *\|.*$", exponents, re.M)[0].split("|") for name in ("", "naive softmax"))
    assert float(fits[heads.index(" fwd peak ")]) > 1.5
    assert re.findall("^## Crossover with (.*)$", text, re.M) == ["torch's SDPA", "naive softmax"]
    for plot in re.findall(r"\]\((\w+\.svg)\)", text):
        svg = (tmp_path / "out" / plot).read_text(encoding="utf-8")
        assert all(name in svg for name in names)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("given", "shares"), [([], (0.2, 0.9)), (["--threads=2"], (0.9, 0.2))])
def test_on_a_busy_machine_times_have_no_exponents_and_a_warning(tmp_path, monkeypatch, capsys, given, shares):
    """Whether it is busy at the start, when processor time is measured instead of the clock's, or at the end."""
    torch.set_num_threads(2)
    left = [*shares]
    monkeypatch.setattr(verbs, "processor_share", lambda: left.pop(0))
    assert bench.main(["attention", "linear", *QUICK, *given, "--output", str(tmp_path)]) == 0
    text, said = (tmp_path / "costs.md").read_text(encoding="utf-8"), capsys.readouterr()
    by_processor = not given and shares[0] < 0.5
    assert ("CPU time of one thread" in text) == by_processor == (torch.get_num_threads() == 1)
    for warning in (text, said.out, said.err):
        assert "this one got 20%" in " ".join(warning.split())
    heads, fits = (
        re.search(rf"^\| {name} *\|.*$", text.partition("## Growth exponents")[2], re.M)[0].split("|")
        for name in ("", "linear")
    )
    for head, fit in zip(heads[2:-1], fits[2:-1], strict=True):
        assert ("-" in fit) == head.strip().endswith("time"), head  # memory is the same


@pytest.mark.usefixtures("undrawn")
def test_the_whole_layer_costs_its_projections_besides(tmp_path):
    for option, folder in (["--layer"], "layer"), ([], "alone"):
        given = ["linear", "--grids=4", *QUICK[1:], "--forward_only", *option, "--output", str(tmp_path / folder)]
        assert bench.main(["attention", *given]) == 0
    layer, alone = (rows_of(tmp_path / folder)["linear", 16] for folder in ("layer", "alone"))
    assert int(layer["macs"]) - int(alone["macs"]) == 4 * 16 * 8 * 8
    assert layer["forward_backward_seconds"] == layer["kept_for_backward_bytes"] == ""


@pytest.mark.usefixtures("undrawn")
def test_modes_are_measured_beside_eager(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda call, dynamic, isolate_recompiles: call)
    monkeypatch.setenv("COLUMNS", "90")
    modes = ["--compile", "--no_recompute", "--grids=4,8"]
    assert bench.main(["attention", "linear", *QUICK, *modes, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines() if line.startswith("  ")) <= 90
    assert re.search(r"^  naive softmax, compiled( +[\d.]+){2}$", printed, re.MULTILINE)
    with (tmp_path / "costs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    kept = {(row["name"], row["mode"], row["amount"]): row["kept_for_backward_bytes"] for row in rows}
    assert int(kept["linear", "no recompute", "64"]) > int(kept["linear", "eager", "64"])
    assert ("naive softmax", "compiled", "64") in kept
    assert ("naive softmax", "no recompute", "64") not in kept
    crossovers = printed.partition("crossover with naive softmax\n")[2].partition("growth exponents")[0]
    assert re.findall(r"^  (linear\S*(?: \w+)*)", crossovers, re.M) == [
        "linear",
        "linear, compiled",
        "linear, no recompute",
    ]


@pytest.mark.usefixtures("undrawn")
def test_a_size_that_a_mechanism_refuses_or_fails_at_is_a_row(tmp_path, capsys):
    given = ["{name: nystrom, num_landmarks: 20}", "tests.cli.bench.test_attention:Broken", *QUICK]
    assert bench.main(["attention", *given, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"nystrom \{num_landmarks: 20\}, 4x4: .*20", printed)
    assert re.search(r"Broken, 8x8: forward pass: failed: RuntimeError: no such kernel", printed)
    rows = rows_of(tmp_path)
    assert rows["nystrom {num_landmarks: 20}", 16]["forward_seconds"] == ""
    assert float(rows["nystrom {num_landmarks: 20}", 64]["forward_seconds"]) > 0


class Broken(linvit.Attention):
    """Fails where it has more than 32 tokens."""

    def forward(self, q, k, v, grid):
        if grid.num_queries > 32:
            raise RuntimeError("no such kernel")
        return v


@pytest.mark.usefixtures("undrawn")
@pytest.mark.skipif(machine.memory() is None, reason="memory is limited on Linux alone")
def test_memory_that_does_not_suffice_is_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "memory", lambda: (2**30, 200 * 2**20))  # bytes that are free; a matrix has 512 MiB
    before = machine.resource.getrlimit(machine.resource.RLIMIT_DATA)
    given = ["linear", "--grids=8,64x128", *QUICK[1:], "--forward_only", "--output", str(tmp_path)]
    assert bench.main(["attention", *given]) == 0
    printed = capsys.readouterr().out
    assert "naive softmax, 64x128: forward pass: out of memory" in printed
    assert re.search(r"^  naive softmax .* memory$", printed, re.MULTILINE)
    assert re.search(r"^  linear .* \d[\d.]*$", printed, re.MULTILINE)
    assert machine.resource.getrlimit(machine.resource.RLIMIT_DATA) == before


@pytest.mark.usefixtures("undrawn")
def test_ctrl_c_keeps_what_is_measured(tmp_path, monkeypatch, capsys):
    def stopped(works, *, times, **options):
        def on_sample(left):
            if sum(map(len, times.values())) == len(works) + 1:
                raise KeyboardInterrupt

        return interleaved(works, times=times, **{**options, "on_sample": on_sample})

    monkeypatch.setattr(costs, "interleaved", stopped)
    assert bench.main(["attention", "linear", *QUICK, "--output", str(tmp_path)]) == 130
    printed = capsys.readouterr()
    assert "interrupted: yes, by Ctrl-C" in printed.out
    assert "the results so far" in printed.err
    passes = ("forward_samples", "forward_backward_samples")  # the second round begins with the second callable
    samples = [int(row[name]) for row in rows_of(tmp_path).values() for name in passes if row[name]]
    assert sorted(set(samples)) == [1, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["attention", "foccused"], r"no attention is called 'foccused'. Did you mean 'focused'\?"),
        (["attention", "{name: focused, power: 3}"], "takes no option 'power'"),
        (["attention", "--grids=14y14"], r"--grids takes sizes such as 14 or 14x28 .* got '14y14'"),
        (["attention", "--device=cuda:7"], r"--device cuda:7 cannot be used \(.*this machine has"),
        (["attention", "--autocast"], "--autocast runs in half precision; got --dtype float32"),
        (["attention", "--cpu_time", "--threads=2"], "add --threads 1"),
        (["attention", "--dim=10", "--heads=3", "linear"], "10 is not divisible|dim 10"),
        (["atention"], r"linvit bench measures attention, backbone; got 'atention'. Did you mean 'attention'\?"),
    ],
    ids=str,
)
def test_mistakes_are_told_before_anything_is_measured(given, message):
    with pytest.raises(linvit.UserError, match=message):
        bench.main(given)


def test_the_defaults_are_all_mechanisms(monkeypatch):
    seen = []
    monkeypatch.setattr(
        verbs, "costs_over_sizes", lambda builders, sizes, *_, **__: seen.append((builders, sizes)) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        bench.main(["attention"])
    assert {*seen[0][0]} == {*linvit.list_attentions(), "torch's SDPA", "naive softmax"}
    assert (28, 56) in seen[0][1]
