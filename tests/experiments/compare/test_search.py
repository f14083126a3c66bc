"""Studies of Optuna: what is searched, and which trials are pruned."""

from types import SimpleNamespace

import pytest

from linvit import UserError
from linvit.experiments.compare.experiment import Experiment
from linvit.experiments.compare.grid import Sweep
from linvit.experiments.compare.results import Results, Variant
from linvit.experiments.compare.search import PruneTrial, Search, open_study
from linvit.runs.folder import RunFolder
from tests.experiments.compare.runs import write_run

pytest.importorskip("optuna")


def test_a_poor_trial_is_pruned_after_the_first_quarter_of_its_epochs_and_told_once(tmp_path):
    study, _ = open_study(tmp_path, "softmax", None)
    for _ in range(5):
        trial = study.ask()
        for epoch in range(8):
            trial.report(0.9, epoch)
        study.tell(trial, 0.9)
    study.ask()
    metrics, strategy = {"val/score": 0.1}, SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision)
    trainer = SimpleNamespace(
        default_root_dir=tmp_path, callback_metrics=metrics, sanity_checking=False, is_global_zero=True, max_epochs=8,
        strategy=strategy, should_stop=False, current_epoch=0,
    )  # fmt: skip
    module = SimpleNamespace(hparams={"predict_with": "raw"})
    for epoch in (0, 1, 1):  # the last twice, as of a run that a kill has set back
        trainer.current_epoch = epoch
        PruneTrial("softmax", 5).on_validation_end(trainer, module)
        assert not trainer.should_stop
    trainer.current_epoch = 2
    PruneTrial("softmax", 5).on_validation_end(trainer, module)
    assert trainer.should_stop
    pruned = open_study(tmp_path, "softmax", None)[0].trials[5]
    assert (pruned.state.name, pruned.intermediate_values) == ("PRUNED", {0: 0.1, 1: 0.1, 2: 0.1})
    empty = Search(tmp_path, Sweep(variants={"softmax": {}}, tune={"model.lr": ["1..2"]}, trials=6)).ask(1)
    assert not empty.variants  # which has an outcome, so it is not run again


def test_a_run_without_a_score_has_failed_and_the_best_is_of_those_that_have_one(tmp_path):
    search = Search(tmp_path, Sweep(variants={"a": {}}, tune={"model.lr": [1, 2]}, search="optuna", trials=2))
    asked = [*search.ask(2).variants]
    with pytest.raises(UserError, match="no trial of the variant 'a' has a score"):
        search.best()
    good = write_run(tmp_path / "run/version_0", scores=(0.5, 0.75))
    search.tell(Results("x", [Variant(asked[0]), Variant(asked[1], {0: RunFolder(good)})], "", None, []))
    assert [trial.state.name for trial in open_study(tmp_path, "a", None)[0].trials] == ["FAIL", "COMPLETE"]
    assert search.best().variants["a"]["model.lr"] in (1, 2)
    assert [*Experiment.of(tmp_path).grid.variants] == ["a-trial1"]


def test_all_variants_begin_with_the_same_values_and_none_is_drawn_twice(tmp_path):
    sweep = Sweep(variants={"a": {}, "b": {}}, tune={"model.lr": ["1e-4..1e-2"]}, search="optuna", trials=4)
    drawn = {"a": [], "b": []}
    for _ in range(4):  # each time as a process of its own would, which a kill has ended before
        for name, settings in Search(tmp_path, sweep).ask(1).variants.items():
            drawn[name[0]].append(settings["model.lr"])
            number = int(name.rpartition("-trial")[2])
            open_study(tmp_path, name[0], None)[0].tell(number, 0.5 if name[0] == "a" else 0.7)
    assert drawn["a"] == drawn["b"]
    assert len({*drawn["a"]}) == 4


def test_ranges_of_more_than_a_decade_are_logarithmic_and_whole_numbers_stay_whole(tmp_path):
    tune = {"model.lr": ["1e-4..1e-2"], "model.weight_decay": ["0.0..0.2"], "model.backbone.depth": ["1..4"],
            "model.head": [{"name": "a"}, {"name": "b"}]}  # fmt: skip
    search = Search(tmp_path, Sweep(variants={"a": {"x": 1}}, tune=tune, search="optuna", trials=2))
    asked = search.ask(5)
    assert ([*asked.variants], asked.seeds, asked.tune) == (["a-trial0", "a-trial1"], [1000], {})
    assert search.ask(1).variants == asked.variants  # until they have an outcome
    given = asked.variants["a-trial0"]
    assert (given["x"], type(given["model.backbone.depth"])) == (1, int)
    assert given["model.head"] in tune["model.head"]
    assert given["model.lr"] == float(f"{given['model.lr']:.3g}")
    spaces = open_study(tmp_path, "a", None)[0].trials[0].distributions
    assert {name: space.log for name, space in spaces.items() if name != "model.head"} == {
        "model.lr": True, "model.weight_decay": False, "model.backbone.depth": False,
    }  # fmt: skip
