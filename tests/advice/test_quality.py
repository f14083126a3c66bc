"""Scores of rows that learned for equal times, and the verdict of score over time."""

import itertools

import pytest
import timm
import torch

import linvit
from linvit.advice import quality
from linvit.advice.verdict import Score, decide_by_score
from tests.advice.test_verdict import Noisy, compared
from tests.data.images import picture, save


def scored(size, **means):
    """Gives rows a score: so many of a thousand images right, the same ones first."""
    for row in size.rows:
        if row.name in means:
            right = round(1000 * means[row.name])
            row.score = Score([1.0] * right + [0.0] * (1000 - right))
    return size


@pytest.mark.parametrize(
    ("hydra", "windows", "answer", "said"),
    [
        (0.85, 0.86, "yes", "hydra is 1.45x"),  # it is faster than both rivals
        (0.5, 0.86, "no", "0.500 against 0.900"),  # it loses too much
        (0.85, 0.99, "yes", "0.850 against 0.900 (-0.050, -0.0"),
    ],
)
def test_a_faster_mechanism_pays_unless_it_loses_a_tenth(hydra, windows, answer, said):
    size = compared(448, Noisy(1), mechanism=0.7, windows=0.8)
    verdict = decide_by_score("planted", scored(size, softmax=0.9, windows=windows, hydra=hydra), "top-1 accuracy")
    assert verdict.answer == answer
    assert said in verdict.sentence
    assert "not measured" not in verdict.sentence


def test_a_rival_that_is_faster_and_better_says_no():
    size = compared(448, Noisy(2), mechanism=0.8, windows=0.6)
    verdict = decide_by_score("planted", scored(size, softmax=0.9, windows=0.9, hydra=0.85), "top-1 accuracy")
    assert verdict.answer == "no"
    assert "windows is 1.3" in verdict.sentence
    assert "0.900 against 0.850" in verdict.sentence


def test_equal_scores_of_a_slower_mechanism_are_undecided():
    size = compared(448, Noisy(3), mechanism=0.8, windows=0.75)
    verdict = decide_by_score("planted", scored(size, softmax=0.9, windows=0.9, hydra=0.9), "top-1 accuracy")
    assert verdict.answer == "undecided"


def test_the_bootstrap_is_paired():
    """Images that both get right add no uncertainty."""
    one, other = Score([1.0] * 900 + [0.0] * 100), Score([1.0] * 890 + [0.0] * 110)
    change = one.over(other)
    assert change.median == pytest.approx(0.01)
    assert 0.003 < change.low < change.high < 0.018


def ticking(monkeypatch):
    monkeypatch.setattr(quality, "HELD_OUT", 16)
    monkeypatch.setattr(quality, "BATCH", 8)
    ticks = itertools.count()
    return lambda: float(next(ticks))


def test_students_and_rivals_learn_labels_of_the_networks_own_classes(monkeypatch):
    nano = linvit.create_backbone({"name": "deit_nano", "depth": 5}, img_size=32, num_classes=10)
    before = {name: value.clone() for name, value in nano.state_dict().items()}
    options = {"clock": ticking(monkeypatch), "threads": 1, "all_sizes": True, "hours": 10 / 3600}
    advice = linvit.advise(nano, 32, attention="linear", data="digits", **options)
    rows = {row.name: row.score for row in advice.sizes[0].rows if row.score}
    trained = {name: score.steps for name, score in rows.items() if name != "the unchanged network"}
    assert advice.quality == "top-1 accuracy"
    assert {"softmax at 24 x 24", "the unchanged network, trained as long", "linear in all 5 blocks"} <= {*trained}
    assert len(set(trained.values())) == 1  # the clock ticks once a step
    assert all(len(score.values) == 16 and {*score.values} <= {0.0, 1.0} for score in rows.values())
    assert "at 32 x 32. DeiT: " in advice.verdict.sentence
    assert all(torch.equal(value, before[name]) for name, value in nano.state_dict().items())


def test_other_classes_are_not_used(monkeypatch):
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=3, num_classes=7)
    options = {"clock": ticking(monkeypatch), "threads": 1, "all_sizes": True, "hours": 6 / 3600}
    advice = linvit.advise(vit, 32, attention="linear", data="digits", **options)
    rows = {row.name: row.score for row in advice.sizes[0].rows if row.score}
    assert "does not have the 10 classes of 'digits'" in advice.quality
    assert rows["the unchanged network"].mean == pytest.approx(1, abs=1e-5)
    assert rows["the unchanged network"].agreement == 1
    assert all(-1 <= score.mean < 1 and 0 <= score.agreement <= 1 for name, score in rows.items() if "in all" in name)
    assert "cosine of tokens" in str(advice)


def test_what_cannot_be_scored_is_said_before_anything_is_timed(monkeypatch, tmp_path):
    monkeypatch.setattr("linvit.advice.advise.measure_ceiling", None)
    for kind in ("images", "masks"):
        save(picture(0), tmp_path / kind / "0.png")
    with pytest.raises(linvit.UserError, match="'deit_nano' is a name alone"):
        linvit.advise("deit_nano", 32, data="digits")
    nano = linvit.create_backbone("deit_nano", img_size=32)
    with pytest.raises(linvit.UserError, match="there is no data at 'no/such'"):
        linvit.advise(nano, 32, data="no/such")
    with pytest.raises(linvit.UserError, match="Name the folder of its images alone"):
        linvit.advise(nano, 32, data=str(tmp_path))
