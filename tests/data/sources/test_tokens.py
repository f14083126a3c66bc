"""Associative recall: every answer is what a naive reader of the image finds, which is why the ceiling is 1."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from linvit.cli import data as check
from linvit.data import DiagnosticData
from linvit.data.sources.tokens import Recall, sample
from linvit.errors import UserError
from linvit.ignore_index import IGNORE_INDEX


def read(image):
    """The tokens of an image, by their row and column: the bits of the key, and the value or None."""
    _, height, width = image.shape
    found = {}
    for row in range(height // 4):
        for column in range(width // 4):
            red, green, blue = image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].reshape(3, 16).tolist()
            assert {*red, *green, *blue} <= {0, 255}
            found[row, column] = (tuple(red + blue), green.index(255) if 255 in green else None)
    return found


def solve(tokens):
    """The answer of each token that has one."""
    pairs = dict(token for token in tokens.values() if token[1] is not None)
    return {at: pairs[key] for at, (key, value) in tokens.items() if any(key) and value is None}


GIVEN = [Recall(pairs=1), Recall(pairs=20), Recall(pairs=9, grid=(4, 10))]


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: f"{given.pairs} pairs")
def test_answers_are_those_of_a_naive_reader(given):
    for seed in range(10):
        made = sample("train", seed, given)
        mask = made["mask"].tolist()
        answers = {(r, c): v for r, row in enumerate(mask) for c, v in enumerate(row) if v != IGNORE_INDEX}
        assert answers == solve(read(made["image"]))


def test_each_pair_is_asked_for_once():
    made = sample("train", 0, GIVEN[2])
    tokens = [token for token in read(made["image"]).values() if any(token[0])]
    assert Counter(value is None for _, value in tokens) == {False: 9, True: 9}
    assert {*Counter(key for key, _ in tokens).values()} == {2}
    assert (made["mask"] != IGNORE_INDEX).sum() == 9


def test_answers_are_about_equally_frequent():
    for given in GIVEN[1:]:
        answers = np.concatenate([sample("train", seed, given)["mask"].flatten() for seed in range(300)])
        counts = np.bincount(answers, minlength=256)[:16]
        expected = counts.sum() / 16
        assert (abs(counts - expected) < 6 * expected**0.5).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 0}, "pairs must be"),
        ({"pairs": 9, "grid": 4}, "recall of 9 pairs needs a grid of 18 tokens; got 4 x 4"),
        ({"eval_grid": (2, 7)}, "64 tokens; got 2 x 7"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        replace(Recall(), **options)


class TestAsData:
    def test_there_is_one_task(self):
        with pytest.raises(UserError, match=r"--data\.source must be one of recall.*Did you mean 'recall'"):
            DiagnosticData("recal")

    def test_another_grid_in_evaluation(self):
        made = DiagnosticData(pairs=2, grid=4, eval_grid=(3, 8), train=8, val=4, test=4, batch_size=4, seed=0)
        made.setup("fit")
        (trained, *_), (tested, *_) = ([*loader()] for loader in (made.train_dataloader, made.val_dataloader))
        assert (trained["image"].shape, trained["mask"].shape) == ((4, 3, 16, 16), (4, 4, 4))
        assert (tested["image"].shape, tested["mask"].shape) == ((4, 3, 12, 32), (4, 3, 8))
        assert made.size == (16, 16)

    def test_data_check_counts_chance(self, capsys):
        assert check.main(["check", "recall", "--pairs", "3"]) == 0
        asked = [sample["mask"] for sample in DiagnosticData(pairs=3)._samples("val")]
        counts = torch.stack(asked).flatten().bincount(minlength=256)[:16]
        assert f"chance {counts.max() / counts.sum():.3f}" in capsys.readouterr().out


def test_another_samples_seed_makes_other_validation_images():
    def first(**seed):
        data = DiagnosticData(pairs=4, val=1, **seed)
        data.setup("validate")
        return next(iter(data.val_dataloader()))["image"]

    assert torch.equal(first(), first(samples_seed=0))
    assert torch.equal(first(samples_seed=1), first(samples_seed=1))
    assert not torch.equal(first(), first(samples_seed=1))
