"""The confusion matrix as a picture."""

import io

import numpy as np
import pytest

from linvit.callbacks.confusion_picture import GAP, TITLE, _short, cell_side, confusion_picture, matrix_picture


def square(picture, row, column, classes=3):
    """The pixels of a cell within its lines, of so many classes."""
    side = cell_side(classes)
    margin = picture.height - TITLE - GAP - classes * side
    left, top = margin + column * side, TITLE + margin + row * side
    return picture.crop((left + 1, top + 1, left + side, top + side))


def cell(picture, row, column, classes=3):
    """Colour of a cell of so many classes, beside its number."""
    return square(picture, row, column, classes).getpixel((1, 1))


def inks(picture, row, column, classes=3):
    """How many colours a cell has."""
    return len(square(picture, row, column, classes).getcolors())


WHITE, FULL = (255, 255, 255), (8, 48, 107)


def test_the_darker_the_more_of_the_row():
    labels = np.array([0] * 4 + [1] * 4 + [2] * 4)
    predicted = np.array([0] * 4 + [1, 2, 2, 2] + [2] * 4)
    picture = confusion_picture(labels, predicted, 3)
    assert cell(picture, 0, 0) == cell(picture, 2, 2) == FULL
    assert cell(picture, 0, 1) == cell(picture, 2, 1) == WHITE
    assert FULL < cell(picture, 1, 2) < cell(picture, 1, 1) < WHITE  # 3 of 4, and 1 of 4


def test_rows_are_labels():
    picture = confusion_picture(np.array([0, 1]), np.array([1, 1]), 2)
    assert cell(picture, 0, 1, classes=2) == FULL
    assert cell(picture, 1, 0, classes=2) == WHITE


def test_of_many_classes_the_most_confused_are_shown_in_their_order():
    labels = np.repeat(np.arange(1000), 10)
    predicted = labels.copy()
    predicted[labels == 700] = 30  # always taken for 30
    predicted[(labels == 5) & (np.arange(len(labels)) % 2 == 0)] = 999
    picture = confusion_picture(labels, predicted, 1000, most=4)  # 5, 30, 700, 999
    assert cell(picture, 2, 1, classes=4) == FULL
    assert cell(picture, 2, 2, classes=4) == WHITE
    assert WHITE > cell(picture, 0, 3, classes=4) > FULL


@pytest.mark.parametrize("classes", [1, 10, 1000, 21841])
def test_it_stays_small(classes):
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(classes, size=(2, 50_000))
    picture = confusion_picture(labels, predicted, classes, [f"a rather long name {i}" for i in range(classes)])
    assert max(picture.size) <= 1800
    file = io.BytesIO()
    picture.save(file, "PNG")
    assert file.tell() < 300_000


def test_the_names_have_the_room_that_they_need():
    short, long = (
        confusion_picture(np.array([0]), np.array([0]), 40, [name] * 40) for name in ("ab", "a rather long name")
    )
    assert short.width + 50 < long.width
    assert cell(short, 0, 0, classes=40) == cell(long, 0, 0, classes=40) == FULL


def test_classes_without_images_are_white():
    picture = confusion_picture(np.array([0]), np.array([0]), 3)
    assert cell(picture, 1, 1) == WHITE


@pytest.mark.parametrize("classes", [3, 50])
def test_a_cell_has_its_number_where_there_are_images(classes):
    picture = confusion_picture(np.array([0] * 9 + [1]), np.array([0] * 8 + [1, 1]), classes)
    assert inks(picture, 0, 0, classes) > 2  # white on dark blue
    assert inks(picture, 0, 1, classes) > 2  # black on a light tone
    assert inks(picture, 1, 0, classes) == inks(picture, 2, 2, classes) == 1
    same = confusion_picture(np.array([0] * 90 + [1]), np.array([0] * 80 + [1] * 11), classes)
    assert cell(same, 0, 0, classes) == cell(picture, 0, 0, classes)
    assert square(same, 0, 0, classes).tobytes() != square(picture, 0, 0, classes).tobytes()


def test_long_numbers_are_short():
    assert [_short(n) for n in (0, 9999, 10_000, 99_999, 9_999_999, 10_000_000, 12 * 10**9)] == [
        *("0", "9999", "10k", "99k", "9999k", "10M", "12G"),
    ]


@pytest.mark.parametrize("most", [2, 50])
def test_a_matrix_gives_the_picture_of_its_pairs(most):
    """But for the word of the title that says what is counted."""
    labels, predicted = np.random.default_rng(0).integers(5, size=(2, 300))
    matrix = np.zeros((5, 5), dtype=np.int64)
    np.add.at(matrix, (labels, predicted), 1)
    of_matrix, of_pairs = matrix_picture(matrix, most=most), confusion_picture(labels, predicted, 5, most=most)
    box = (0, TITLE, min(of_matrix.width, of_pairs.width), of_pairs.height)
    assert of_matrix.height == of_pairs.height
    assert of_matrix.crop(box).tobytes() == of_pairs.crop(box).tobytes()
