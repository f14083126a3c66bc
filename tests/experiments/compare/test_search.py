"""Studies of Optuna: what is searched, and which trials are pruned."""

from types import SimpleNamespace

import pytest

from linvit.experiments.compare.grid import Sweep
from linvit.experiments.compare.search import PruneTrial, Search, open_study

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
    for epoch in (0, 1, 1):  # twice, as of a run that a kill has set back
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
