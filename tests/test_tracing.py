"""`torch.jit.trace` with gradients on, as fvcore and TensorBoard use it, and gradients per sample by `vmap`."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import linvit
from linvit.registry import attentions
from tests.families import families, small
from tests.helpers import own_names, perturb, randn

FAMILIES = sorted(set(families().values()) - {"timm"})
# torch 2.15 batches the gradient of a BatchNorm in evaluation wrongly where what follows lays it out token by token.
WRONG_BATCH_NORM = {"mlla_small", "ravlt_t"}


def traced_like_eager(model: nn.Module, size: int) -> None:
    first, second = randn(2, 3, size, size), randn(2, 3, size, size, seed=1)
    traced = torch.jit.trace(model, first, check_trace=False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    results = []
    for run in (traced, model):
        out = run(second)
        results.append([out, *torch.autograd.grad(out.square().sum(), parameters)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def gradients_per_sample(model: nn.Module, size: int) -> None:
    images = randn(2, 3, size, size)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, torch.Tensor], image: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, image[None]).square().sum()

    got = vmap(grad(loss), (None, 0))(parameters, images)
    for i, image in enumerate(images):
        want = torch.autograd.grad(model(image[None]).square().sum(), list(parameters.values()))
        for name, wanted in zip(parameters, want, strict=True):
            torch.testing.assert_close(got[name][i], wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore")  # torch warns of what a trace keeps constant, and of slow operators under vmap
@pytest.mark.parametrize("attention", sorted(own_names(attentions)))
def test_every_mechanism(attention: str) -> None:
    spec = {"name": "deit_nano", "embed_dim": 24, "depth": 1, "img_size": 16}
    model = perturb(linvit.create_backbone(spec, attention=attention, num_classes=3).double().eval(), scale=0.1)
    traced_like_eager(model, 16)
    gradients_per_sample(model, 16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [name if name in ("pvt_v2_b0", "swin_small") else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_every_family(name: str) -> None:
    model = perturb(linvit.create_backbone({**small(name), "img_size": 32}, num_classes=3).double().eval(), scale=0.1)
    traced_like_eager(model, 32)
    if name not in WRONG_BATCH_NORM:
        gradients_per_sample(model, 32)
