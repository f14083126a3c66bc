"""The confusion matrix as a picture."""

import numpy as np
import pytest
from torchmetrics.classification import MulticlassConfusionMatrix

from linvit.callbacks.report import confusion_picture


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn: fractions and names."""
    found, plot = [], MulticlassConfusionMatrix.plot

    def watched(metric, val, ax, **options):
        found.append((val.numpy(), options["labels"]))
        return plot(metric, val, ax, **options)

    monkeypatch.setattr(MulticlassConfusionMatrix, "plot", watched)
    return found


def test_rows_are_labels_and_add_up_to_one(drawn):
    labels = np.array([0] * 4 + [1] * 4 + [2] * 4)
    predicted = np.array([0] * 4 + [1, 2, 2, 2] + [2] * 4)
    confusion_picture(labels, predicted, ["cat", "dog", "a name of more than eighteen letters"])
    confusion_picture(np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2]), "012", np.array([4, 1, 3, 4]))
    for fractions, _ in drawn:
        np.testing.assert_array_equal(fractions, [[1, 0, 0], [0, 0.25, 0.75], [0, 0, 1]])
    assert [names for _, names in drawn] == [["cat", "dog", "a name of more tha"], ["0", "1", "2"]]


def test_of_many_classes_the_most_confused_are_shown_in_their_order(drawn):
    labels = np.repeat(np.arange(1000), 10)
    predicted = labels.copy()
    predicted[labels == 700] = 30  # always taken for 30
    predicted[(labels == 5) & (np.arange(len(labels)) % 2 == 0)] = 999
    confusion_picture(labels, predicted, [*map(str, range(1000))], most=4)
    ((fractions, names),) = drawn
    assert names == ["5", "30", "700", "999"]
    np.testing.assert_array_equal(fractions, [[0.5, 0, 0, 0.5], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize("classes", [1, 21841])
def test_it_stays_small(classes):
    labels, predicted = np.random.default_rng(0).integers(classes, size=(2, 5000))
    picture = confusion_picture(labels, predicted, [*map(str, range(classes))])
    assert picture.dtype == np.uint8
    assert max(picture.shape[:2]) < 1800
    assert len(np.unique(picture)) > 10
