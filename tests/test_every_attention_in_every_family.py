"""Every mechanism of linvit in every family of backbones, forward and backward: four at a time, in the stages of one
model; the slow tests have each alone in all stages."""

import itertools

import pytest
import torch

import linvit
from linvit import Attention
from linvit.registry import attentions, backbones
from linvit.registry.signatures import parameters_of
from tests.families import families, small
from tests.helpers import leaves, own_names, perturb, randn

SIZE = (64, 96)
HOSTS = {family: name for family, name in families().items() if "attention" in parameters_of(backbones.get(name))}


WINDOWS = {
    "sla": 2,
    "lolcats": 2,
}  # smaller than the maps: where one window is all, nothing is left for the linear part
NAMES = own_names(attentions)
PARTS = [NAMES[i::12] for i in range(12)]
ALONE = [pytest.param([name], marks=pytest.mark.slow) for name in NAMES]


@pytest.mark.parametrize("names", [*PARTS, *ALONE], ids="-".join)
@pytest.mark.parametrize("family", HOSTS)
def test_forward_and_backward(family: str, names: list[str]) -> None:
    torch.manual_seed(0)
    spec = small(HOSTS[family], model="test_vit")  # of timm, one of six blocks whose attention can be replaced
    if "depth" in spec:
        spec["depth"] = 4
    if family == "EfficientViT":
        spec["depths"] = [1, 1, 2, 2]  # attention is in the last two stages
    count = len(spec["depths"]) if "depths" in spec else spec.get("depth", 6)
    specs = [{"name": name, "window_size": WINDOWS[name]} if name in WINDOWS else name for name in names]
    attention = list(itertools.islice(itertools.cycle(specs), count))
    model = perturb(linvit.create_backbone(spec, attention=attention, num_classes=5, img_size=list(SIZE)), scale=0.1)
    mechanisms = [module for module in model.modules() if isinstance(module, Attention)]
    assert {type(module) for module in mechanisms} == {attentions.get(name) for name in names}
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
    if family != "timm_backbone":  # whose models reshape by numbers of elements themselves
        assert model.eval()(x[:0]).shape == (0, 5)
