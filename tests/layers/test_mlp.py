"""The choice between feed-forward layers, and the families of backbones that offer it."""

import pytest
import torch

import linvit
from linvit import UserError
from linvit.layers.block import Block
from linvit.layers.mlp import MBConv
from linvit.registry import backbones
from linvit.registry.signatures import parameters_of
from tests.families import families, small
from tests.helpers import perturb, randn

CHOOSING = {family: name for family, name in families().items() if "ffn" in parameters_of(backbones.get(name))}


def test_another_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"ffn must be one of mlp, mbconv; got 'mbcon'. Did you mean 'mbconv'\?"):
        linvit.create_backbone({"name": "deit_nano", "ffn": "mbcon"})


@pytest.mark.parametrize("family", CHOOSING)
def test_every_block_of_a_family_has_what_is_chosen(family: str) -> None:
    """Its hidden width is the MLP's, and gradients reach all of it, the images and a class token included."""
    torch.manual_seed(0)
    context = {"num_classes": 5, "img_size": [64, 96]}
    default = linvit.create_backbone(small(CHOOSING[family]), **context)
    model = perturb(linvit.create_backbone({**small(CHOOSING[family]), "ffn": "mbconv"}, **context), scale=0.1)
    hidden = [block.mlp.fc1.out_features for block in default.modules() if isinstance(block, Block)]
    chosen = [block.mlp for block in model.modules() if isinstance(block, Block)]
    assert all(isinstance(mlp, MBConv) for mlp in chosen)
    assert [mlp.depth_conv.out_channels for mlp in chosen] == hidden
    x = randn(2, 3, 64, 96, dtype=torch.float32, grad=True)
    features = model.forward_features(x)
    (features * randn(*features.shape, seed=1, dtype=torch.float32)).sum().backward()
    for name, tensor in {
        "the images": x,
        **{f"mlp.{n}": p for mlp in chosen for n, p in mlp.named_parameters()},
    }.items():
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name
        assert tensor.grad.any(), name
