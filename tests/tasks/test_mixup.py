"""Mixup and CutMix against timm's, for the same lambda and box; and what is drawn."""

import numpy as np
import pytest
import torch
from timm.data import mixup as timms
from torch.nn import functional as F

from linvit.tasks.classification import Mixup, cutmix, mixup
from tests.data.distributions import alike, even

CLASSES, SIDE = 7, 20


@pytest.fixture(autouse=True)
def box_of_the_recipes(monkeypatch):
    """timm's CutMix as in the versions that the papers pinned: 0.3.2, 0.3.4 and 0.4.12 cut 2 * (side // 2) pixels.

    1.0.20 still does so; 1.0.31 cuts all of an odd side.
    """

    def rand_bbox(img_shape, lam, margin=0.0, count=None):
        (height, width), ratio = img_shape[-2:], np.sqrt(1 - lam)
        cut_h, cut_w = int(height * ratio), int(width * ratio)
        cy, cx = np.random.randint(0, height, size=count), np.random.randint(0, width, size=count)
        rows = np.clip(cy - cut_h // 2, 0, height), np.clip(cy + cut_h // 2, 0, height)
        return *rows, np.clip(cx - cut_w // 2, 0, width), np.clip(cx + cut_w // 2, 0, width)

    monkeypatch.setattr(timms, "rand_bbox", rand_bbox)


def batch(count=6):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, SIDE, SIDE + 4, generator=generator)
    return images, torch.randint(CLASSES, (count,), generator=generator)


def by_timm(images, labels, share, cutmix, smoothing, monkeypatch):
    """timm's mixed images and targets for a given lambda."""
    mixup = timms.Mixup(1.0, 1.0, label_smoothing=smoothing, num_classes=CLASSES)
    monkeypatch.setattr(mixup, "_params_per_batch", lambda: (share, cutmix))
    return mixup(images.clone(), labels)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
@pytest.mark.parametrize("key", range(2))
def test_images_and_loss_are_timm_s(kind, key, smoothing, monkeypatch):
    images, labels = batch()
    alphas = (0.8, 0.0) if kind == "mixup" else (0.0, 1.0)
    mixed, shares = Mixup(*alphas)(images, labels, CLASSES, key)

    rng = np.random.default_rng((key, 1))  # the numbers that were drawn: whether, which, lambda, then the centre
    rng.random(2)
    share = rng.beta(max(alphas), max(alphas))
    monkeypatch.setattr(np.random, "randint", lambda low, high, size=None: rng.integers(low, high))
    expected, target = by_timm(images, labels, share, kind == "cutmix", smoothing, monkeypatch)

    assert torch.allclose(mixed, expected, atol=1e-6)
    logits = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(1))
    ours = F.cross_entropy(logits, shares, label_smoothing=smoothing)
    theirs = -(target * logits.log_softmax(-1)).sum(-1).mean()  # timm's SoftTargetCrossEntropy
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_the_box_and_the_share_are_timm_s(share, monkeypatch):
    images, _ = batch()
    for seed in range(50):
        rng = np.random.default_rng(seed)
        monkeypatch.setattr(np.random, "randint", lambda low, high, size=None, rng=rng: rng.integers(low, high))
        (top, bottom, left, right), corrected = timms.cutmix_bbox_and_lam(images.shape, share)
        mixed, own = cutmix(images, share, np.random.default_rng(seed))
        assert own == pytest.approx(corrected)
        expected = images.clone()
        expected[:, :, top:bottom, left:right] = images.flip(0)[:, :, top:bottom, left:right]
        assert torch.equal(mixed, expected)


def test_what_is_drawn_is_distributed_as_timm_s():
    """Shares by Kolmogorov and Smirnov, the choice of the two by chi-squared; 0.001 significance, fixed seeds."""
    count = 3000
    images, labels = torch.zeros(2, 1, 9, 9), torch.tensor([0, 1])
    images[1] = 1
    mixing, other = Mixup(0.8, 1.0), timms.Mixup(0.8, 1.0)
    np.random.seed(0)
    shares, theirs = {True: [], False: []}, {True: [], False: []}
    for key in range(count):
        mixed, target = mixing(images, labels, 2, key)
        cut = bool(((mixed == 0) | (mixed == 1)).all())  # mixup makes values in between
        shares[cut].append(round(target[0, 0].item(), 5))
        share, cutmix = other._params_per_batch()
        if cutmix:
            _, share = timms.cutmix_bbox_and_lam(images.shape, share)
        theirs[bool(cutmix)].append(round(float(share), 5))
    assert even([len(shares[True]), len(shares[False])])
    for cut in (True, False):
        assert alike(shares[cut], theirs[cut])


def test_the_key_decides_and_no_global_generator_does():
    images, labels = batch()
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        results.append(Mixup(0.8, 1.0)(images, labels, CLASSES, 11)[0])
    assert torch.equal(*results)
    assert not torch.equal(results[0], Mixup(0.8, 1.0)(images, labels, CLASSES, 12)[0])


def test_nothing_is_mixed_in_place_and_an_odd_image_is_its_own_partner():
    images, labels = batch(5)
    before = images.clone()
    for mixing in (Mixup(1.0, 0.0), Mixup(0.0, 1.0)):
        mixed, _ = mixing(images, labels, CLASSES, 0)
        assert torch.equal(images, before)
        assert torch.allclose(mixed[2], images[2])
    assert torch.allclose(mixup(images, 0.25), 0.25 * images + 0.75 * images.flip(0))
