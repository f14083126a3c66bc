"""Probes of frozen features, beside their plain formulas in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

import linvit
from linvit import UserError
from linvit.analysis import probes
from linvit.analysis.probes import STRENGTHS, linear_probe, nearest_neighbours, pooled_features

CLASSES = 4


@pytest.fixture
def features():
    """Correlated features of four classes that overlap, their labels, and as many others."""
    labels = torch.arange(120) % CLASSES
    centres, mix = torch.randn(CLASSES, 6), torch.randn(6, 6)
    known, queries = (centres[own] + torch.randn(len(own), 6) for own in (labels, labels[:30]))
    return (known @ mix + 3).double(), labels, (queries @ mix + 3).double()


def test_neighbours_vote_by_their_similarity(features, monkeypatch):
    monkeypatch.setattr(probes, "SIMILARITIES", 500)  # four queries at a time
    known, labels, queries = features
    found = nearest_neighbours(known, labels, queries, [1, 10, 20])
    similarities = F.cosine_similarity(queries[:, None], known, dim=-1).tolist()
    for count, classes in zip([1, 10, 20], found.tolist(), strict=True):
        for similar, guess in zip(similarities, classes, strict=True):
            votes = [0.0] * CLASSES
            for similarity, label in sorted(zip(similar, labels.tolist(), strict=True), reverse=True)[:count]:
                votes[label] += math.exp(similarity / 0.07)
            assert votes.index(max(votes)) == guess
    assert (found[0] != found[2]).any()


def test_there_are_as_many_features_as_neighbours(features):
    known, labels, queries = features
    with pytest.raises(UserError, match=r"neighbours must be .* at most 120; got 121"):
        nearest_neighbours(known, labels, queries, [121])


def test_a_linear_probe_is_converged_logistic_regression(features):
    known, labels, queries = features
    fitted = linear_probe(known, labels, CLASSES, [10.0])
    mean, std = known.mean(0), known.std(0, correction=0)
    weight = ((fitted.weight * std[:, None]).detach()).requires_grad_()
    bias = (fitted.bias + mean @ fitted.weight).requires_grad_()
    penalty = weight.square().sum() / (2 * 10 * len(labels))
    loss = F.cross_entropy((known - mean) / std @ weight + bias, labels) + penalty
    gradients = torch.autograd.grad(loss, [weight, bias])
    assert max(gradient.abs().max() for gradient in gradients) < 2e-5  # the minimum: the objective is convex
    right = fitted.logits(queries).argmax(-1) == labels[:30]
    assert fitted.correct(queries, labels[:30]) == right.sum()


def test_cross_validation_on_the_training_images_chooses_the_regularisation(features):
    known, labels, _ = features
    other = torch.randn(len(labels), 60, dtype=torch.float64)  # tells nothing of the classes
    chosen = linear_probe(torch.cat([known, other], 1), labels, CLASSES)
    alone = linear_probe(torch.cat([known, other], 1), labels, CLASSES, [chosen.strength])
    torch.testing.assert_close(chosen.weight, alone.weight)
    assert chosen.strength < 1  # the unrelated features want a strong penalty
    assert linear_probe(known[:4], labels[:4], CLASSES).strength == min(STRENGTHS)  # nothing to choose by


def test_parts_of_the_logits_change_nothing(features, monkeypatch):
    known, labels, _ = features
    whole = linear_probe(known, labels, CLASSES, [1.0])
    monkeypatch.setattr(probes, "LOGITS", 100)
    torch.testing.assert_close(linear_probe(known, labels, CLASSES, [1.0]).weight, whole.weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "levels", "kinds"),
    [
        ({"name": "deit_tiny", "depth": 2}, ["blocks.0", "blocks.1"], ["mean", "class token"]),
        ({"name": "deit_nano", "depth": 1}, ["blocks.0"], ["mean"]),
        ("pvt_v2_b0", [f"stages.{i}" for i in range(4)], ["mean"]),
        (
            {"name": "timm", "model": "vit_tiny_patch16_224"},
            [f"blocks.{i}" for i in range(12)],
            ["mean", "class token"],
        ),
        ({"name": "timm", "model": "resnet10t"}, ["act1", *(f"layer{i}" for i in range(1, 5))], ["mean"]),
    ],
)
def test_features_are_pooled_at_each_layer(spec, levels, kinds):
    network = linvit.create_backbone(spec, img_size=32).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        found = pooled_features(network, images)
        last = network.forward_head(network.forward_features(images), pre_logits=True)
        chosen = pooled_features(network, images, [-1])
    assert [*found] == [(i, level, kind) for i, level in enumerate(levels) for kind in kinds]
    torch.testing.assert_close(found[len(levels) - 1, levels[-1], kinds[-1]], last)  # what its classifier gets
    assert [*chosen] == [(len(levels) - 1, levels[-1], kind) for kind in kinds]
    with pytest.raises(UserError, match=f"feature indices .* do not fit {len(levels)} features"):
        pooled_features(network, images, [len(levels)])
