"""Multiply-accumulates of models against sums written out by hand."""

import pytest
import torch
from torch import Tensor, nn

import linvit
from linvit.analysis.model_cost import macs, num_parameters


class Mixer(nn.Module):
    """A convolution, a matrix product, a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, stride=4, groups=1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2).mT  # (1, N, 8)
        return self.head((self.norm(x).mT @ x).softmax(-1))  # (1, 8, 5)


BY_HAND = 6 * 8 * 3 * 16 + 6 * 8 * 8 + 8 * 8 * 5  # 2 x 3 patches


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_convolution_product_and_linear(device: str) -> None:
    model = Mixer().to(device)
    assert macs(model, (8, 12)) == BY_HAND
    assert num_parameters(model) == 8 * 48 + 8 + 16 + 8 * 5 + 5


def test_the_model_is_left_as_it_was() -> None:
    model = Mixer().train()
    macs(model, 8)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_image_channels() -> None:
    assert macs(nn.Conv2d(4, 2, 1), 3, in_chans=4) == 9 * 8


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fused", [True, False])
def test_both_products_of_softmax_count_on_every_device(device: str, fused: bool) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    spec = {"name": "softmax", "fused": fused}
    model = linvit.create_backbone("deit_nano", attention=spec, num_classes=0).to(device)
    tokens, width, depth = 64, 96, 4
    block = 12 * tokens * width**2 + 2 * tokens**2 * width
    assert macs(model, 32) == tokens * 16 * 3 * width + depth * block


def test_counts_of_mechanism_and_model_agree() -> None:
    model = linvit.create_backbone("deit_nano", attention="linear", num_classes=0)
    without = linvit.create_backbone("deit_nano", attention="hydra", num_classes=0)  # no products
    (cost,) = {block.attn.mechanism.cost(linvit.Grid((8, 8))) for block in model.blocks}
    assert macs(model, 32) - macs(without, 32) == 4 * cost.matmul
