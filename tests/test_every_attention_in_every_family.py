"""The matrix: every mechanism of linvit in every family of backbones, forward and backward."""

import pytest
import torch

import linvit
from linvit import Attention
from linvit.registry import attentions, backbones
from linvit.signatures import parameters_of
from tests.families import families, small
from tests.helpers import leaves, own_names, perturb, randn

SIZE = (64, 96)
HOSTS = {family: name for family, name in families().items() if "attention" in parameters_of(backbones.get(name))}


@pytest.mark.parametrize("attention", own_names(attentions))
@pytest.mark.parametrize("family", HOSTS)
def test_forward_and_backward(family: str, attention: str) -> None:
    torch.manual_seed(0)
    spec = small(HOSTS[family], model="test_vit")  # of timm, one whose attention can be replaced
    model = perturb(linvit.create_backbone(spec, attention=attention, num_classes=5, img_size=list(SIZE)), scale=0.1)
    mechanisms = [module for module in model.modules() if isinstance(module, Attention)]
    assert mechanisms
    assert all(type(module) is attentions.get(attention) for module in mechanisms)
    x = randn(2, 3, *SIZE, dtype=torch.float32, grad=True)
    features = model.forward_features(x)
    logits = model.forward_head(features)
    assert logits.shape == (2, 5)
    assert features.isfinite().all()
    assert logits.isfinite().all()
    # DistributedDataParallel fails at a parameter on which no loss depends.
    weights = {name: id(weight) for name, weight in model.named_parameters() if weight.requires_grad}
    reached = leaves(logits)
    assert not [name for name, own in weights.items() if own not in reached]
    # What the last block does to the patches alone reaches the features, not the logits of a class token.
    outs = (features, logits)
    torch.autograd.backward(outs, [randn(*out.shape, seed=1, dtype=torch.float32) for out in outs])
    for name, tensor in {"the images": x, **dict(model.named_parameters())}.items():
        if tensor.requires_grad:
            assert tensor.grad is not None, name
            assert tensor.grad.isfinite().all(), name
            assert tensor.grad.any(), name
