"""Probes of frozen features: classification by nearest neighbours and by linear classifiers."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.backbones.base import feature_indices
from linvit.errors import UserError, check_number
from linvit.registry.signatures import takes

SIMILARITIES = 2**26  # maximum number that nearest neighbours store at a time
TEMPERATURE = 0.07  # of the votes: smaller values give near neighbours more weight
STRENGTHS = tuple(10.0**power for power in range(-3, 4))
FOLDS, MANY = 5, 50_000  # parts of cross-validation; number of images above which one part is enough
LOGITS = 2**24  # maximum number that logistic regression stores at a time
STEPS, TOLERANCE = 1000, 1e-5  # of L-BFGS: maximum number of steps, and the gradient at which it stops


def pooled_features(
    network: Any, images: Tensor, levels: Sequence[int] | None = None
) -> dict[tuple[int, str, str], Tensor]:
    """Pools the features of images (B, C, H, W) at each level of a backbone: blocks or stages, negative from the end.

    Features have their norms, in a plain transformer the final norm, as in DINO's evaluation. Returns (B, C) by
    position, name of the level, and kind: "mean" of the patches, or "class token".
    """
    network = getattr(network, "backbone", network)
    names = [str(level["module"]) for level in getattr(network, "feature_info", [])]
    if not names or not hasattr(network, "forward_intermediates"):
        raise UserError(f"{type(network).__name__} does not return features of its layers (forward_intermediates)")
    chosen = sorted(set(feature_indices(len(names), levels)))
    options: dict[str, Any] = {"indices": chosen, "intermediates_only": True, "stop_early": True}
    if takes(network.forward_intermediates, "return_prefix_tokens"):
        options["return_prefix_tokens"] = True
    try:
        found = network.forward_intermediates(images, norm=True, **options)
    except AssertionError:  # some of timm's models have no norm of features, and refuse to apply it
        found = network.forward_intermediates(images, **options)
    pooled = {}
    for level, feature in zip(chosen, found, strict=True):
        patches, prefix = feature if isinstance(feature, tuple) else (feature, None)  # (B, C, H, W), (B, P, C)
        pooled[level, names[level], "mean"] = patches.mean((2, 3))
        if prefix is not None and getattr(network, "cls_token", None) is not None:
            pooled[level, names[level], "class token"] = prefix[:, 0]
    return pooled


def nearest_neighbours(features: Tensor, labels: Tensor, queries: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns classes (len(counts), Q) by a vote of the nearest features, weighted by exp(cosine similarity / 0.07).

    Wu et al. 2018, "Unsupervised feature learning via non-parametric instance discrimination", Section 3.4, as DINO
    evaluates (k 10 and 20, this temperature). Features (N, C) with labels (N,) vote on queries (Q, C).
    """
    for count in counts:
        check_number("the number of neighbours", count, at_least=1, at_most=len(features), whole=True)
    features, queries = F.normalize(features, dim=-1), F.normalize(queries, dim=-1)
    classes = int(labels.max()) + 1
    found = []
    for part in queries.split(max(1, SIMILARITIES // len(features))):
        similarity, nearest = (part @ features.T).topk(max(counts))  # (q, k)
        weight = ((similarity - 1) / TEMPERATURE).exp()  # at most 1; a common factor of all votes has no effect
        votes = [
            weight.new_zeros(len(part), classes).scatter_add_(1, labels[nearest[:, :count]], weight[:, :count])
            for count in counts
        ]
        found.append(torch.stack(votes).argmax(-1))
    return torch.cat(found, 1)


class LinearProbe(NamedTuple):
    """Linear classifier of features."""

    weight: Tensor  # (C, K)
    bias: Tensor  # (K,)
    strength: float
    """Strength `C` of the regularisation."""

    def logits(self, features: Tensor) -> Tensor:
        """Returns logits (N, K) of features (N, C)."""
        return torch.addmm(self.bias, features, self.weight)

    def correct(self, features: Tensor, labels: Tensor) -> int:
        """Returns the number of features (N, C) that are classified as their label (N,)."""
        parts = zip(features.split(4096), labels.split(4096), strict=True)
        return sum(int((self.logits(part).argmax(-1) == own).sum()) for part, own in parts)


def linear_probe(
    features: Tensor, labels: Tensor, num_classes: int, strengths: Sequence[float] = STRENGTHS
) -> LinearProbe:
    """Fits logistic regression to features (N, C) to convergence; cross-validation chooses the regularisation.

    Five folds with equal shares of each class are held out in turn; with more than 50,000 images, only one of them. Of
    the strengths `C` (scikit-learn's: the weight of the loss relative to the penalty), the one with the highest
    held-out accuracy is used, or the strongest penalty of equal ones, and all features are fitted with it.
    """
    right = dict.fromkeys(sorted(strengths), 0)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(labels.device)
    fold = torch.empty_like(labels)
    fold[order[labels[order].argsort(stable=True)]] = torch.arange(len(labels), device=labels.device) % FOLDS
    for k in range(FOLDS if len(labels) <= MANY else 1):
        held = fold == k
        if len(right) > 1 and 0 < held.sum() < len(labels):
            found = _logistic_regressions(features[~held], labels[~held], num_classes, [*right])
            for each in found:
                right[each.strength] += each.correct(features[held], labels[held])
    best = max(right, key=lambda strength: right[strength])
    return next(_logistic_regressions(features, labels, num_classes, [best]))


def _logistic_regressions(
    features: Tensor, labels: Tensor, num_classes: int, strengths: Sequence[float]
) -> Iterator[LinearProbe]:
    """Yields classifiers fitted by L-BFGS, each starting from the weights of the previous one.

    Minimises the mean cross entropy plus |weight|^2 / (2 C N), on standardised features; biases have no penalty. The
    logits are computed in parts, so that those of many images and classes fit into memory.
    """
    std, mean = torch.std_mean(features, 0, correction=0)
    std = (std.square() + 1e-6).sqrt()
    count, size = len(features), max(1, LOGITS // num_classes)
    joint = features.new_zeros(features.shape[1] + 1, num_classes)  # (C + 1, K), the last row is the bias
    for strength in strengths:

        def loss(penalty: float = 1 / (strength * count)) -> Tensor:
            """Returns the objective and writes its gradient into that of `joint`."""
            weight = joint[:-1]
            value, joint.grad = penalty / 2 * weight.square().sum(), torch.cat([penalty * weight, 0 * joint[-1:]])
            for part, own in zip(features.split(size), labels.split(size), strict=True):
                x = (part - mean) / std  # (n, C)
                logs = torch.addmm(joint[-1], x, weight).log_softmax(-1)  # (n, K)
                value = value + F.nll_loss(logs, own, reduction="sum") / count
                error = (logs.exp() - F.one_hot(own, num_classes)) / count
                joint.grad[:-1] += x.T @ error
                joint.grad[-1] += error.sum(0)
            return value

        solver = torch.optim.LBFGS(
            [joint], max_iter=STEPS, tolerance_grad=TOLERANCE, tolerance_change=1e-9, line_search_fn="strong_wolfe"
        )
        solver.step(loss)
        weight = joint[:-1] / std[:, None]  # of the original features
        yield LinearProbe(weight, joint[-1] - mean @ weight, strength)
