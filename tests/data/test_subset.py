"""Data with some of a network's classes: labels by name, logits of the other classes left out."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

import linvit
from linvit.data import ClassificationData
from linvit.data.sources.labels import places_of
from tests.cli.runs import linvit as command
from tests.data.images import image_folder, save

ODD = ["1", "3", "5", "7", "9"]


@pytest.fixture(scope="session")
def odd_digits(tmp_path_factory):
    """The first eight test digits of each odd class, a folder per class."""
    folder = tmp_path_factory.mktemp("digits") / "odd"
    digits = ClassificationData("digits", num_workers=0, img_size=32)
    labels = np.array(digits.splits["test"]["label"])
    for name in ODD:
        for row in np.flatnonzero(labels == int(name))[:8].tolist():
            save(digits.splits["test"][row]["image"], folder / "test" / name / f"{row}.png")
    return folder


def count(run, folder, names):
    """Of the images of a folder, how many the run's network gets right when it may choose among some classes alone."""
    model = linvit.load(run.folder)
    right = 0
    for path in sorted(folder.rglob("*.png")):
        with torch.no_grad():
            logits = model.network(model.transform(Image.open(path))[None])[0]
        right += max(names, key=lambda name: float(logits[int(name)])) == path.parent.name
    return right


def test_a_subset_is_scored_as_a_count_by_hand(run, odd_digits):
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


def test_folders_called_by_numbers():
    assert places_of(["2", "0"], ["cat", "dog", "owl"], "v2") == [2, 0]
    assert places_of(["2", "10"], ["10", "2", "11"], "digits") == [1, 0]  # the names themselves are numbers
    with pytest.raises(linvit.UserError, match=r"'3'.* The network has 'cat', 'dog', 'owl'"):
        places_of(["2", "3"], ["cat", "dog", "owl"], "v2")
