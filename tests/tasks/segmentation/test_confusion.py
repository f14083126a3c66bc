"""Scores of a confusion matrix against mmsegmentation's, scikit-learn's definitions, and sums over ranks."""

import torch

from linvit.ignore_index import IGNORE_INDEX
from linvit.tasks.segmentation.scores import PixelConfusion, class_scores, mean_scores
from tests.golden_files import load


def confusion(prediction, label, classes):
    metric = PixelConfusion(classes)
    for one, other in zip(prediction, label, strict=True):
        metric.update(one[None], other[None])
    return metric.compute()


def test_equals_mmsegmentation():
    """With classes that are absent, and ignored pixels."""
    golden = load("dense_seg_metrics")
    label = golden.tensors["input.gt_raw"].clone()
    label = torch.where((label == 0) | (label == IGNORE_INDEX), IGNORE_INDEX, label - 1)  # reduce_zero_label
    matrix = confusion(golden.tensors["input.pred"], label, golden.constructor["num_classes"])
    found = {
        "area_intersect": matrix.diagonal(),
        "area_label": matrix.sum(1),
        "area_pred": matrix.sum(0),
        "area_union": matrix.sum(0) + matrix.sum(1) - matrix.diagonal(),
    }
    for name, area in found.items():
        assert torch.equal(area, golden.tensors[f"output.{name}"]), name
    scores, means = class_scores(matrix), mean_scores(matrix)
    for name, value in {"iou": scores["IoU"], "acc": scores["Acc"]}.items():
        want = golden.tensors[f"output.{name}"].double()
        want[want == -1] = torch.nan  # as the file writes it
        torch.testing.assert_close(value, want, equal_nan=True, rtol=1e-6, atol=0)
    for name in ("mIoU", "mAcc", "aAcc"):
        golden.check(f"output.{name}", means[name])


def test_f1_and_kappa_by_hand():
    """Two classes: of 10 labelled 0, 8 are right; of 10 labelled 1, 7. By chance 0.5 x 0.55 + 0.5 x 0.45 agree."""
    means = mean_scores(torch.tensor([[8, 2], [3, 7]]))
    assert means["aAcc"] == 0.75
    torch.testing.assert_close(means["kappa"], torch.tensor(0.5, dtype=torch.float64))
    torch.testing.assert_close(means["mF1"], torch.tensor((16 / 21 + 14 / 19) / 2, dtype=torch.float64))


def test_classes_may_be_left_out_of_the_means_only():
    matrix = torch.tensor([[8, 2, 0], [3, 7, 0], [5, 0, 5]])
    scores, all_of, some = class_scores(matrix), mean_scores(matrix), mean_scores(matrix, [2])
    torch.testing.assert_close(some["mIoU"], scores["IoU"][:2].mean())
    torch.testing.assert_close(all_of["mIoU"], scores["IoU"].mean())
    assert some["aAcc"] == all_of["aAcc"] == 20 / 30
    assert some["kappa"] == all_of["kappa"]
