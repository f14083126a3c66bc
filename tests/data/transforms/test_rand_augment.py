"""RandAugment's notation, and what is drawn against timm's RandAugment."""

import collections
import math
import random

import numpy as np
import pytest
from PIL import Image
from timm.data import auto_augment

import linvit
from linvit.data.loading.sampler import generator
from linvit.data.transforms.geometry import PixelOp, Warp
from linvit.data.transforms.rand_augment import OPERATIONS, RandAugment, color_jitter
from tests.data.distributions import alike, even, follows, independent, uniform
from tests.data.transforms.test_pixel_ops import TIMM

RECIPE = "rand-m9-mstd0.5-inc1"
COUNT = 6000


def ours(text):
    augment = RandAugment.parse(text)
    return [augment.draw(generator(seed)) for seed in range(COUNT)]


def theirs(text, monkeypatch):
    """Names and amounts of what timm's transform does to images, in our words."""
    words = {timm: word for word, timm in TIMM.items()}
    done = []

    def spy(name):
        def operation(image, amount=0.0, **_):
            done[-1].append((words[name.removesuffix("Increasing")], amount))
            return image

        return operation

    for name in auto_augment.NAME_TO_OP:
        monkeypatch.setitem(auto_augment.NAME_TO_OP, name, spy(name))
    transform = auto_augment.rand_augment_transform(text, {"img_mean": (0, 0, 0)})
    random.seed(0)
    np.random.seed(0)
    image = Image.new("RGB", (8, 8))
    for _ in range(COUNT):
        done.append([])
        transform(image)
    return done


@pytest.mark.parametrize("text", [RECIPE, "rand-m7-n3-mstd100-p0.3", "rand-m9-mstd101-inc1", "rand-m5-mstd4-mmax8"])
def test_operations_and_amounts_are_distributed_as_timm_s(text, monkeypatch):
    """Chi-squared on operations and on how many there are per image; Kolmogorov and Smirnov on each one's amounts."""
    mine, timms = ours(text), theirs(text, monkeypatch)
    for count in (lambda drawn: [len(one) for one in drawn], lambda drawn: [name for one in drawn for name, _ in one]):
        tallies = [collections.Counter(count(drawn)) for drawn in (mine, timms)]
        assert tallies[0].keys() == tallies[1].keys()
        table = [[tally[key] for key in tallies[0]] for tally in tallies]
        assert independent(table)
    amounts = [collections.defaultdict(list) for _ in range(2)]
    for drawn, found in zip((mine, timms), amounts, strict=True):
        for name, amount in (pair for one in drawn for pair in one):
            found[name].append(amount)
    for name in OPERATIONS:
        assert alike(amounts[0][name], amounts[1][name]), name


def test_the_first_operation_says_nothing_about_the_second():
    pairs = collections.Counter(tuple(name for name, _ in one) for one in ours("rand-p1"))
    table = [[pairs[first, second] for second in OPERATIONS] for first in OPERATIONS]
    assert independent(table)


@pytest.mark.parametrize(
    ("name", "level", "expected"),
    [
        ("rotate", 0.9, {-27, 27}),
        ("shear_x", 1, {-0.3, 0.3}),
        ("translate_y", 0.5, {-0.225, 0.225}),
        ("posterize", 0.9, {1}),
        ("posterize", 1, {0}),
        ("solarize", 0.9, {26}),
        ("solarize_add", 0.9, {99}),
        ("color", 0.9, {0.19, 1.81}),
        ("sharpness", 1, {0.1, 1.9}),
        ("invert", 0.9, {0}),
    ],
)
def test_what_a_level_means(name, level, expected):
    """The table of the recipe: both signs, where there are two."""
    augment = RandAugment.parse(RECIPE)
    found = {round(augment.amount(name, level, generator(seed)), 6) for seed in range(20)}
    assert found == expected


def test_moves_are_in_pixels_of_the_image_and_filled_with_its_mean():
    augment = RandAugment.parse("rand-m10-n40-p1-inc1")
    ops = augment.ops(generator(0), (100, 200), "bicubic", (1, 2, 3))
    warps = {op.matrix for op in ops if isinstance(op, Warp)}
    assert {(1, 0, 90, 0, 1, 0), (1, 0, 0, 0, 1, 45)} <= {tuple(map(abs, matrix)) for matrix in warps}
    assert all(op.bicubic and op.fill == (1, 2, 3) for op in ops if isinstance(op, Warp))


def test_notation():
    assert RandAugment.parse("rand") == RandAugment(10, 2, 0, False, 10, 0.5)
    assert RandAugment.parse("rand-m9-n3-mstd0.5-inc1-mmax9-p0.7") == RandAugment(9, 3, 0.5, True, 9, 0.7)
    assert RandAugment.parse("rand-inc0") == RandAugment()


@pytest.mark.parametrize("text", ["augmix-m5", "rand-m", "rand-x3", "rand-m9-mstd", "rand-tweights", "", "rand m9"])
def test_an_unknown_notation_is_a_user_error(text):
    with pytest.raises(linvit.UserError) as error:
        RandAugment.parse(text)
    assert repr(text) in str(error.value)
    assert RECIPE in str(error.value)


@pytest.mark.parametrize("text", ["rand-n0", "rand-p1.5", "rand-mmax11"])
def test_a_number_out_of_range_is_a_user_error(text):
    with pytest.raises(linvit.UserError, match="n must be at least 1"):
        RandAugment.parse(text)


def test_jitter_changes_three_things_in_any_order():
    drawn = [color_jitter(generator(seed), 0.4) for seed in range(3000)]
    orders = collections.Counter(tuple(op.name for op in one) for one in drawn)
    assert len(orders) == math.factorial(3)
    assert even(list(orders.values()))
    for name in ("brightness", "contrast", "color"):
        factors = [op.amount for one in drawn for op in one if op.name == name]
        assert follows(factors, uniform(0.6, 1.4))
    assert min(op.amount for op in color_jitter(generator(0), 5)) >= 0
    assert all(isinstance(op, PixelOp) for op in drawn[0])
