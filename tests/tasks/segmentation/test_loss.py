"""Losses of pixels against mmsegmentation's and against their definitions."""

import pytest
import torch
from torch.nn import functional as F

from linvit.ignore_index import IGNORE_INDEX
from linvit.tasks.segmentation.scores import dice_loss, pixel_cross_entropy
from tests.golden_files import load
from tests.helpers import randn


def case(name):
    golden = load(name)
    return golden, golden.tensors["input.logits"].clone().requires_grad_(), golden.tensors["input.label"].squeeze(1)


def test_both_means_equal_mmsegmentation_s():
    golden, logits, label = case("dense_seg_ce")
    losses = {f"loss_{kind}_pixels": pixel_cross_entropy(logits, label, kind) for kind in ("all", "valid")}
    for name, loss in losses.items():
        golden.check(f"output.{name}", loss)
    upsampled = F.interpolate(logits, label.shape[-2:], mode="bilinear")
    scalar = sum(losses.values()) + (upsampled * golden.tensors["probe.upsampled"]).sum()
    scalar.backward()
    golden.check("grad_input.logits", logits.grad)


@pytest.mark.parametrize("average", ["all", "valid"])
def test_a_batch_without_labels_has_no_loss_and_no_gradient(average):
    golden, logits, label = case("dense_seg_ce_all_ignored")
    loss = pixel_cross_entropy(logits, label, average)
    golden.check("output.loss_all_pixels", loss)
    loss.backward()
    golden.check("grad_input.logits", logits.grad)
    dice = dice_loss(logits, label)
    assert dice == 0
    assert torch.equal(torch.autograd.grad(dice, logits)[0], torch.zeros_like(logits))


def test_smoothing_spreads_the_target_over_all_classes():
    logits, label = randn(2, 4, 5, 6), torch.randint(4, (2, 5, 6))
    label[0, 0] = IGNORE_INDEX
    valid = label != IGNORE_INDEX
    target = F.one_hot(label.clamp(max=3), 4).movedim(-1, 1) * 0.9 + 0.1 / 4
    want = -(target * logits.log_softmax(1)).sum(1)[valid].mean()
    torch.testing.assert_close(pixel_cross_entropy(logits, label, "valid", 0.1), want.float())


def test_dice_is_its_definition_over_the_classes_that_are_there():
    logits, label = randn(2, 5, 4, 4, grad=True), torch.randint(3, (2, 8, 8))
    label[1, :3] = IGNORE_INDEX
    resized = F.interpolate(logits, (8, 8), mode="bilinear").softmax(1)
    terms = []
    for k in range(3):
        p, y = resized[:, k][label != IGNORE_INDEX], (label[label != IGNORE_INDEX] == k).double()
        terms.append(1 - 2 * (p * y).sum() / (p.sum() + y.sum()))
    want = sum(terms) / 3
    got = dice_loss(logits, label)
    torch.testing.assert_close(got, want.float())
    gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
