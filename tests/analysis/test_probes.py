"""Probes of frozen features, beside their plain formulas in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

import linvit
from linvit import UserError
from linvit.analysis import probes
from linvit.analysis.probes import linear_probes, nearest_neighbours, pooled_features

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


def test_linear_probes_become_logistic_regression(features):
    known, labels, queries = features
    trained = linear_probes(known, labels, CLASSES, [0.1, 0.3], epochs=400, batch_size=120, weight_decay=0.05)
    mean, std = known.mean(0), known.std(0, correction=0)
    weight, bias = (
        torch.zeros(*shape, dtype=torch.float64, requires_grad=True) for shape in ((6, CLASSES), (CLASSES,))
    )
    solver = torch.optim.LBFGS([weight, bias], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def loss():
        solver.zero_grad()
        value = F.cross_entropy((known - mean) / std @ weight + bias, labels) + 0.05 / 2 * weight.square().sum()
        value.backward()
        return value

    solver.step(loss)
    expected = ((queries - mean) / std @ weight + bias).softmax(-1)
    for i in range(2):
        assert (trained.logits(queries)[:, i].softmax(-1) - expected).abs().max() < 1e-4
    right = (((known - mean) / std @ weight + bias).argmax(-1) == labels).double().mean()
    assert trained.accuracies(known, labels).tolist() == pytest.approx([right.item()] * 2)


def test_each_learning_rate_is_trained_as_if_it_were_alone(features):
    known, labels, _ = features
    together = linear_probes(known, labels, CLASSES, [0.01, 1.0], epochs=3, batch_size=50)
    alone = linear_probes(known, labels, CLASSES, [1.0], epochs=3, batch_size=50)
    assert torch.allclose(together.weight[:, 1:], alone.weight)
    assert not torch.allclose(together.weight[:, :1], alone.weight)


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
