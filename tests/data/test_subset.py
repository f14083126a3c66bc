"""Data with some of a network's classes: labels by name, logits of the other classes left out."""

import re

import pytest

from tests.cli.runs import linvit as command
from tests.data.images import image_folder
from tests.digit_folders import count, digit_folder

ODD = ["1", "3", "5", "7", "9"]


def test_a_subset_is_scored_as_a_count_by_hand(run, tmp_path):
    odd_digits = tmp_path / "odd"
    digit_folder(odd_digits / "test", ODD)
    done = run.then("test", f"--data.source={odd_digits}", "--data.classes=subset")
    assert done.code == 0, done.err
    assert "40 images of 5 of the 10 classes; logits of the others are left out" in done.out
    found = float(re.search(r"test/top1 +(\S+)", done.out)[1])
    assert found == pytest.approx(count(run, odd_digits, ODD) / 40)
    assert found > count(run, odd_digits, [*map(str, range(10))]) / 40  # the others would have misled it


def test_what_is_no_subset_is_refused(run, tmp_path):
    image_folder(tmp_path / "mine", ["test"], ["1", "3", "eleven"])
    done = run.then("test", f"--data.source={tmp_path / 'mine'}", "--data.classes=subset")
    assert done.code == 2
    assert "1 of the 3 classes of " in done.err
    assert "are not among those of the network: 'eleven'. The network has '0', '1'" in done.err
    done = command("fit", "--config=quickstart", "--data.classes=subset", cwd=tmp_path)
    assert "--data.classes=subset is for scores of a trained network" in done.err
