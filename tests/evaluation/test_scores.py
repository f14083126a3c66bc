"""Figures against torchmetrics and against sums by hand."""

import math

import pytest
import torch
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_calibration_error

from linvit.evaluation.corruptions import ALEXNET, CORRUPTIONS
from linvit.evaluation.model import EvaluatedModel
from linvit.evaluation.report import corruption_tables
from linvit.evaluation.scores import Score, corruption_errors, is_imagenet, outcomes, summary
from linvit.evaluation.sets import ImageSet
from linvit.inference.preprocessing import Preprocessing


def of(classes):
    return ImageSet("x", None, None, None, (), range(classes))


def drawn(images=500, classes=7):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(images, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (images,), generator=generator)


def test_calibration_and_nll_are_those_of_torchmetrics_and_torch():
    logits, label = drawn()
    score = summary(of(7), (32, 32), outcomes(logits, [[each] for each in label.tolist()], range(7)))
    assert score.top1 == (logits.argmax(1) == label).double().mean()
    assert score.nll == pytest.approx(F.cross_entropy(logits, label).item(), abs=1e-6)
    wanted = multiclass_calibration_error(logits.softmax(1), label, 7, n_bins=15, norm="l1")
    assert score.ece == pytest.approx(wanted.item(), abs=1e-6)
    assert sum(images for images, *_ in score.bins) == score.images == 500


def test_several_labels_none_and_a_choice_among_some():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 4, dtype=torch.float64)
    found = outcomes(logits, [[1, 2], [], [0], [3]], [1, 2, 3])
    p = logits[0, 1:].softmax(0).tolist()
    assert found[0].tolist() == pytest.approx([1, p[0], -math.log(p[0] + p[1])])
    assert found[1:3].isnan().all()  # no label, and one that cannot be chosen
    assert found[3].tolist() == pytest.approx([0, p[0], -math.log(p[2])])
    score = summary(of(3), (32, 32), found)
    assert (score.images, score.top1) == (2, 0.5)


def test_mce_by_hand():
    top1 = {(name, severity): 1 - 0.1 * severity for name in ALEXNET for severity in range(1, 6)}
    top1["fog", 5] = 0.0  # errors 0.1, 0.2, 0.3, 0.4, 1
    plain = corruption_errors(top1, published=False)
    assert (plain["snow"], plain["fog"]) == (pytest.approx(0.3), pytest.approx(0.4))
    over = corruption_errors(top1, published=True)
    assert over["gaussian_noise"] == pytest.approx(1.5 / (5 * 0.886428))  # sums over the severities
    assert over["snow"] == pytest.approx(0.3 / ALEXNET["snow"])


def test_alexnet_is_for_imagenet_alone():
    names = ["n01440764", *map(str, range(999))]
    assert is_imagenet(names, (224, 224))
    assert not is_imagenet(names, (64, 64))
    assert not is_imagenet([*map(str, range(1000))], (224, 224))
    model = EvaluatedModel(lambda images: images, names, Preprocessing([0], [1]))
    kinds = [("c", name) for name in ALEXNET] + [("few", "fog"), ("c_extra", "spatter")]
    scores = [
        Score(set_name, (224, 224), 9, 1000, 0.5, 0, 0, [], corruption=kind, severity=severity)
        for set_name, kind in kinds
        for severity in range(1, 6)
    ]
    found = corruption_tables(scores, model)
    assert "mCE" in found["c"][1]
    assert "not over AlexNet's" in found["few"][1]  # an mCE is of all 15
    assert "not over AlexNet's" in found["c_extra"][1]  # whose errors nobody published


def test_there_are_15_and_4_corruptions():
    assert [len(names) for names in CORRUPTIONS.values()] == [15, 4]
    of_each_severity = [0.69528, 0.82542, 0.93554, 0.98138, 0.99452], [0.51002, 0.54718, 0.57294, 0.65458, 0.74778]
    for name, errors in zip(("gaussian_noise", "jpeg_compression"), of_each_severity, strict=True):
        assert ALEXNET[name] == pytest.approx(sum(errors) / 5)
