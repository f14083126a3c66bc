"""The table of linvit's own backbones: complete, and equal to what the built models have."""

import pytest
import torch

import linvit
from linvit import AttentionLayer
from linvit.analysis import macs, num_parameters
from linvit.attention.circulant import CirculantAttention
from linvit.attention.soft import SoftAttention
from linvit.attention.soft_norm import SoftNormAttention
from linvit.registry import backbones
from linvit.registry.model_info import model_info
from tests.helpers import own_names

OWN = [name for name in own_names(backbones) if name != "timm"]


def test_every_row_is_of_a_backbone() -> None:
    assert model_info().keys() <= set(OWN)


def test_an_accuracy_has_a_source() -> None:
    for name, facts in model_info().items():
        assert bool(facts.top1_source) == (facts.top1 is not None), name
        assert facts.top1 is None or 60 < facts.top1 < 90


@pytest.mark.parametrize("name", [name for name, facts in model_info().items() if facts.also])
def test_a_second_model_of_a_row_is_another_one_that_can_be_built(name: str) -> None:
    with torch.device("meta"):
        model = linvit.create_backbone({"name": name, **model_info()[name].also})
    assert num_parameters(model) not in (0, model_info()[name].parameters)


ROWS = [
    pytest.param(name, marks=[pytest.mark.slow] if facts.macs > 1.5e9 else []) for name, facts in model_info().items()
]


@pytest.mark.parametrize("name", ROWS)
def test_parameters_and_macs_are_the_published(name: str) -> None:
    with torch.device("meta"):
        model = linvit.create_backbone(name)
    facts = model_info()[name]
    assert num_parameters(model) == facts.parameters
    ours = macs(model, facts.img_size) + extra_products_of_soft(model, facts.img_size)
    ours += extra_products_of_circulant(model)
    if any(isinstance(module, SoftNormAttention) for module in model.modules()):
        # The reference halves alpha up to ten times, as its data want, with a product each; we take one for all.
        matrices = sum(module.num_heads for module in model.modules() if isinstance(module, SoftNormAttention))
        halvings = (facts.macs - ours) / LANDMARKS**3
        assert halvings == int(halvings)
        assert 0 <= halvings <= 10 * matrices
    elif any(isinstance(module, SoftAttention | CirculantAttention) for module in model.modules()):
        assert ours == facts.macs
    else:
        assert ours == pytest.approx(facts.macs, rel=0.005)


def extra_products_of_circulant(model: torch.nn.Module) -> int:
    """Its reference projects the real and imaginary parts of its input's transform, which are more than patches."""
    total = 0
    for layer in model.modules():
        if isinstance(layer, AttentionLayer) and isinstance(layer.mechanism, CirculantAttention):
            rows, columns = layer.mechanism.grid.size
            total += (2 * rows * (columns // 2 + 1) - rows * columns) * layer.qkv.weight.numel()
    return total


LANDMARKS = 49  # in every stage of SOFT, at 224


def extra_products_of_soft(model: torch.nn.Module, img_size: int) -> int:
    """What SOFT's reference computes and we do not need to.

    It sums the squares of its distances by products with matrices of ones, and multiplies `(P Y) (P^T v)` where
    `P (Y (P^T v))` is less. Our gradient of the inverse takes two products more in the forward pass.
    """
    total = 0
    for module in model.modules():
        if not isinstance(module, SoftAttention | SoftNormAttention):
            continue
        tokens, width = module.grid.num_queries, module.head_dim
        ones = 2 * (tokens + LANDMARKS) * LANDMARKS * width
        order = LANDMARKS**2 * (tokens - width)
        ours = 2 * LANDMARKS**3 if module.inverse.backward == "analytic" else 0
        total += module.num_heads * (ones + order - ours)
    return total
