"""What TensorBoard shows of an experiment first."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from linvit.experiments.compare.report import write_summary
from linvit.experiments.compare.results import Results, group
from linvit.runs.folder import find
from tests.experiments.compare.runs import write_run


def shown(folder):
    """What a run shows."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_a_run_per_variant_has_the_mean_over_seeds_and_another_one_the_bars_and_the_table(tmp_path):
    for seed, scores in enumerate([(0.5, 0.7), (0.6, 0.8)]):
        write_run(tmp_path / f"linear-seed{seed}/version_0", seed, scores, attention="linear")
        write_run(tmp_path / f"softmax-seed{seed}/version_0", seed, (0.4, 0.5))
    results = Results("x", group(find([tmp_path])), "softmax", None, ["model.attention"])
    for _ in range(2):  # a later report replaces it
        write_summary(results, tmp_path, "cpu")
    means = {name: shown(tmp_path / "summary" / name).Scalars("compare/val/score") for name in ("linear", "softmax")}
    assert [(event.step, event.value) for event in means["linear"]] == [
        (9, pytest.approx(0.55)),
        (19, pytest.approx(0.75)),
    ]
    assert [event.value for event in means["softmax"]] == [pytest.approx(0.4), pytest.approx(0.5)]
    whole = shown(tmp_path / "summary")
    assert len(whole.Images("compare/val/score")) == 1
    (text,) = whole.Tensors("compare/text_summary")
    assert b"| linear | 0.7500" in text.tensor_proto.string_val[0]
    assert len(list((tmp_path / "summary").rglob("events*"))) == 3


def test_a_value_with_a_path_is_no_folder(tmp_path):
    for number, value in enumerate(["softmax", "../../../away", "x" * 300]):
        write_run(tmp_path / f"runs/version_{number}", attention=value)
    results = Results("x", group(find([tmp_path])), "attention=softmax", None, ["model.attention"])
    write_summary(results, tmp_path / "a/b", "cpu")
    names = sorted(path.name for path in (tmp_path / "a/b/summary").iterdir() if path.is_dir())
    assert names == ["attention-..-..-..-away", "attention-softmax", f"attention-{'x' * 70}-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "runs"]
