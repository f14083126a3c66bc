"""LightHam against its formula entry by entry in float64, and what its factorisation is."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.heads.segmentation.light_ham import Hamburger, LightHam
from tests.helpers import assert_exported_for_any_batch, assert_near, assert_same_gradients, perturb, randn

CHANNELS, SIZES, WIDTH = (3, 5, 4), ((4, 6), (2, 3), (1, 2)), 64


def made(**options: int) -> LightHam:
    torch.manual_seed(0)
    head = LightHam(CHANNELS, (8, 16, 32), 7, width=WIDTH, **{"rank": 5, **options}).double()
    return perturb(head, scale=0.1).eval()


def features(batch: int = 2) -> list[Tensor]:
    return [randn(batch, c, *size, seed=i, grad=True) for i, (c, size) in enumerate(zip(CHANNELS, SIZES, strict=True))]


def linear(layer: torch.nn.Module, x: Tensor) -> Tensor:
    out = torch.einsum("oi,bihw->bohw", layer.weight[:, :, 0, 0], x)
    return out if layer.bias is None else out + layer.bias[:, None, None]


def normed(layers: torch.nn.Sequential, x: Tensor) -> Tensor:
    """GroupNorm of 32 groups behind a linear layer."""
    x = linear(layers.conv, x)
    groups = x.reshape(len(x), 32, -1)
    deviation = (groups.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    whitened = ((groups - groups.mean(-1, keepdim=True)) / deviation).view_as(x)
    return whitened * layers.gn.weight[:, None, None] + layers.gn.bias[:, None, None]


def naive_factorisation(x: Tensor, d: Tensor, steps: int) -> Tensor:
    """D C^T of one image (C, N), from D (C, rank)."""
    powers = torch.exp(torch.einsum("dn,dr->nr", x, d))
    c = powers / powers.sum(1, keepdim=True)
    for step in range(steps + 1):
        c = c * torch.einsum("dn,dr->nr", x, d) / (torch.einsum("ns,ds,dr->nr", c, d, d) + 1e-6)
        if step < steps:
            d = d * torch.einsum("dn,nr->dr", x, c) / (torch.einsum("ds,ns,nr->dr", d, c, c) + 1e-6)
    return d @ c.T


def naive(head: LightHam, maps: list[Tensor]) -> Tensor:
    joined = torch.cat([F.interpolate(x, SIZES[0], mode="bilinear", align_corners=False) for x in maps], 1)
    x = normed(head.squeeze, joined).relu()
    rows = linear(head.hamburger.ham_in, x).relu().flatten(2)
    numbers = torch.tensor([(i * 40503 % 65536) / 65536 for i in range(WIDTH * head.hamburger.rank)]).double()
    bases = numbers.view(WIDTH, -1)
    bases = bases / bases.square().sum(0).sqrt()
    low = torch.stack([naive_factorisation(each, bases, head.hamburger.eval_steps) for each in rows]).view_as(x)
    return linear(head.classifier, normed(head.align, (x + normed(head.hamburger.ham_out, low)).relu()).relu())


@pytest.mark.parametrize("options", [{}, {"rank": 1, "eval_steps": 2}, {"eval_steps": 0}], ids=str)
def test_equals_formula(options: dict[str, int]) -> None:
    head, maps = made(**options), features()
    assert_same_gradients(head(maps), naive(head, maps), [*maps, *head.parameters()], 1e-9)


def test_updates_bring_the_factorisation_nearer_and_keep_its_rank() -> None:
    rows, distances = randn(1, 12, 40, seed=3).abs(), []
    for steps in range(6):
        ham = Hamburger(12, 3, steps, steps).double().eval()
        low = ham.factorised(rows, ham.bases(rows))
        assert torch.linalg.matrix_rank(low).item() == 3
        assert (low >= 0).all()
        distances.append((low - rows).norm().item())
    assert distances == sorted(distances, reverse=True)


def test_training_draws_where_evaluation_is_the_same_for_every_image() -> None:
    head, maps = made(), features()
    assert_near(head([x[1:] for x in maps]), head(maps)[1:], 1e-12)
    head.train().dropout.eval()
    with torch.random.fork_rng(devices=[]):
        drawn = [head(maps) for _ in range(2)]
    assert (drawn[0] - drawn[1]).abs().max() > 1e-6


def test_it_takes_the_maps_from_a_reduction_of_8_on() -> None:
    assert LightHam.levels((4, 8, 16, 32)) == [1, 2, 3]
    assert LightHam.levels((2, 4, 8)) == [2]
    assert LightHam((64, 192, 384), (8, 16, 32), 150).reduction == 8


def test_exported_it_is_for_any_number_of_images() -> None:
    assert_exported_for_any_batch(Hamburger(8, 4, 6, 7).double(), randn(3, 8, 4, 5), 1e-12)
