"""What frozen features of a network tell of the classes: nearest neighbours, and linear classifiers side by side."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.backbones.base import feature_indices
from linvit.errors import UserError, check_number
from linvit.signatures import takes

SIMILARITIES = 2**26  # that nearest neighbours hold at a time
TEMPERATURE = 0.07  # of the votes: the smaller, the more the nearest count
MOMENTUM = 0.9


def pooled_features(
    network: Any, images: Tensor, levels: Sequence[int] | None = None
) -> dict[tuple[int, str, str], Tensor]:
    """Pools the features of images (B, C, H, W) at each level of a backbone: blocks or stages, negative from the end.

    They have the norms that belong to them, in a plain transformer the final norm, as in DINO's evaluation. Returns
    (B, C) by position, name of the level, and what it is: the "mean" of patches, or the "class token".
    """
    network = getattr(network, "backbone", network)
    names = [str(level["module"]) for level in getattr(network, "feature_info", [])]
    if not names or not hasattr(network, "forward_intermediates"):
        raise UserError(f"{type(network).__name__} tells no features of its layers (forward_intermediates)")
    chosen = sorted(set(feature_indices(len(names), levels)))
    options: dict[str, Any] = {"indices": chosen, "intermediates_only": True, "stop_early": True}
    if takes(network.forward_intermediates, "return_prefix_tokens"):
        options["return_prefix_tokens"] = True
    try:
        found = network.forward_intermediates(images, norm=True, **options)
    except AssertionError:  # some of timm's have no norm of features, and refuse to apply it
        found = network.forward_intermediates(images, **options)
    pooled = {}
    for level, feature in zip(chosen, found, strict=True):
        patches, prefix = feature if isinstance(feature, tuple) else (feature, None)  # (B, C, H, W), (B, P, C)
        pooled[level, names[level], "mean"] = patches.mean((2, 3))
        if prefix is not None and getattr(network, "cls_token", None) is not None:
            pooled[level, names[level], "class token"] = prefix[:, 0]
    return pooled


def nearest_neighbours(features: Tensor, labels: Tensor, queries: Tensor, counts: Sequence[int]) -> Tensor:
    """Classes (len(counts), Q) by a vote of the nearest features, weighted by exp(cosine similarity / 0.07).

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
        weight = ((similarity - 1) / TEMPERATURE).exp()  # at most 1; a factor of all votes changes nothing
        votes = [
            weight.new_zeros(len(part), classes).scatter_add_(1, labels[nearest[:, :count]], weight[:, :count])
            for count in counts
        ]
        found.append(torch.stack(votes).argmax(-1))
    return torch.cat(found, 1)


class LinearProbes(NamedTuple):
    """Linear classifiers, one per learning rate."""

    weight: Tensor  # (C, G, K) of G classifiers of K classes
    bias: Tensor  # (G, K)

    def logits(self, features: Tensor) -> Tensor:
        """Logits (N, G, K) of features (N, C)."""
        return torch.addmm(self.bias.flatten(), features, self.weight.flatten(1)).view(-1, *self.bias.shape)

    def accuracies(self, features: Tensor, labels: Tensor) -> Tensor:
        """The fraction (G,) of features (N, C) that each classifier gives their label (N,)."""
        parts = zip(features.split(4096), labels.split(4096), strict=True)
        right = torch.stack([(self.logits(part).argmax(-1) == own[:, None]).sum(0) for part, own in parts])
        return right.sum(0) / len(labels)


def linear_probes(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    lrs: Sequence[float],
    *,
    epochs: int = 100,
    batch_size: int = 256,
    weight_decay: float = 0.0,
) -> LinearProbes:
    """Trains linear classifiers of features (N, C) side by side: SGD with momentum 0.9, and a cosine to 0.

    Features are standardised, as by the BatchNorm without parameters before MAE's linear probe, so that one grid of
    learning rates fits all layers. Weights start at 0. DINOv2 trains such a grid at once, too. The order of the
    features is always the same; biases are not decayed.
    """
    std, mean = torch.std_mean(features, 0, correction=0)
    std = (std.square() + 1e-6).sqrt()
    wide = len(lrs) * num_classes
    weight, bias = features.new_zeros(features.shape[1], wide), features.new_zeros(wide)
    momenta = torch.zeros_like(weight), torch.zeros_like(bias)
    rates = features.new_tensor(lrs).repeat_interleave(num_classes)  # (G K,)
    order = torch.Generator().manual_seed(0)
    per_epoch = math.ceil(len(features) / batch_size)
    for epoch in range(epochs):
        for i, rows in enumerate(torch.randperm(len(features), generator=order).split(batch_size)):
            x = (features[rows.to(features.device)] - mean) / std  # (B, C)
            target = F.one_hot(labels[rows.to(labels.device)], num_classes)[:, None]  # (B, 1, K)
            probability = torch.addmm(bias, x, weight).unflatten(1, (len(lrs), num_classes)).softmax(-1)
            error = (probability - target).flatten(1) / len(rows)  # (B, G K), of the loss over the logits
            gradients = torch.addmm(weight, x.T, error, beta=weight_decay), error.sum(0)
            factor = rates * 0.5 * (1 + math.cos(math.pi * (epoch + i / per_epoch) / epochs))
            for value, momentum, gradient in zip((weight, bias), momenta, gradients, strict=True):
                momentum.mul_(MOMENTUM).add_(gradient)
                value -= factor * momentum
    weight = weight / std[:, None]  # of features as they are
    return LinearProbes(weight.view(-1, len(lrs), num_classes), (bias - mean @ weight).view(len(lrs), num_classes))
