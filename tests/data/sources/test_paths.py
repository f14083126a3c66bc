"""Pathfinder: the label is what one finds who follows the ink from dot to dot, and no easier cue tells it."""

import numpy as np
import pytest
import torch

from linvit import UserError
from linvit.cli import data as check
from linvit.data import PathfinderData
from linvit.data.sources.paths import sample


def joined(grey):
    """Whether the white pixels of both dots hang together by pixels with any ink."""
    dots = [tuple(place) for place in np.argwhere(grey == 255)]
    seen, waiting = {dots[0]}, [dots[0]]
    while waiting:
        y, x = waiting.pop()
        around = {(y + down, x + right) for down in (-1, 0, 1) for right in (-1, 0, 1)}
        found = {at for at in around - seen if max(at) < len(grey) and min(at) >= 0 and grey[at]}
        seen |= found
        waiting += found
    return seen.issuperset(dots)


@pytest.mark.parametrize("side", [32, 64])
def test_the_label_says_whether_the_ink_joins_the_dots(side):
    made = [sample("train", seed, side) for seed in range(100)]
    images, labels = [one["image"] for one in made], [one["label"] for one in made]
    assert {image.shape for image in images} == {(3, side, side)}
    assert 35 < sum(labels) < 65
    # some dashes lie so near to others, or so far from the next, that the pixels between tell the contrary
    assert sum(joined(image[0].numpy()) == label for image, label in zip(images, labels, strict=True)) >= 95
    ink = torch.tensor([float(image.float().mean()) for image in images])
    centres = [np.argwhere(image[0].numpy() == 255).std(0).sum() for image in images]  # how far the dots are apart
    for cue in (ink, torch.tensor(centres)):
        high = (cue > cue.median()) == torch.tensor(labels, dtype=torch.bool)
        assert 0.35 < high.float().mean() < 0.65


def test_a_sample_is_a_function_of_its_seed_and_evaluation_is_the_same_in_all_runs():
    first, again, other = (sample("train", seed, 32)["image"] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    batches = [
        next(iter(PathfinderData(val=4, num_workers=0, seed=seed).evaluation_dataloader("val"))) for seed in (0, 1)
    ]
    assert torch.equal(batches[0]["image"], batches[1]["image"])
    assert batches[0]["label"].tolist() == batches[1]["label"].tolist()


def test_data_check_counts_chance_and_other_sizes_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(PathfinderData.__init__, "__defaults__", ("pathfinder", 32, 8, 8, 8, 0))
    labels = [one["label"] for one in PathfinderData()._samples("val")]
    assert check.main(["check", "pathfinder"]) == 0
    assert f"chance {max(labels.count(0), labels.count(1)) / 8:.3f}" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--data\.img_size must be one of 32, 64; got '48'"):
        PathfinderData(img_size=48)
