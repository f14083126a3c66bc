"""The behaviour of a backbone from call to call, from sample to sample, and in copies."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from linvit.testing.attention.inputs import EXACT, relative_error
from linvit.testing.backbone.images import Subject, images
from linvit.testing.report import Finding, at, failed, passed

NEIGHBOURS = (1.0, 2.0**-4, 2.0**4)  # their scales


@torch.no_grad()
def determinism(subject: Subject) -> Finding:
    """Checks that evaluation uses no random numbers, keeps nothing, and does not write to its images."""
    model, x = subject.model, subject.given.clone()
    state = copy.deepcopy(model.state_dict())
    first = _seeded(model, x, 0)
    if not torch.equal(x, subject.given):
        return failed("it writes to its images")
    second = _seeded(model, x, 1)
    if not torch.equal(first, second):
        return failed(f"two calls in evaluation differ by {relative_error(second, first):.0e}")
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])]
    if changed:
        return failed(f"a call in evaluation changes its state: {', '.join(changed)}")
    return passed("two calls in evaluation are bit-equal")


@torch.no_grad()
def batch_independence(subject: Subject) -> Finding:
    """Checks that in evaluation an image gives the same alone and among others of another scale."""
    scales = torch.tensor(NEIGHBOURS, dtype=torch.float64).view(-1, 1, 1, 1)
    x = images(subject.size, batch=len(NEIGHBOURS)) * scales
    together = subject.model(x)
    errors = [relative_error(subject.model(x[i : i + 1]), together[i : i + 1]) for i in range(len(x))]
    worst = math.nan if any(map(math.isnan, errors)) else max(errors)
    said = f"alone and among neighbours of {min(NEIGHBOURS):g} to {max(NEIGHBOURS):g} times its scale"
    if not worst <= EXACT:
        return failed(f"{said}, an image's logits differ by {worst:.0e} (at most {EXACT:.0e})")
    return passed(f"{worst:.0e} {said}")


def copies(subject: Subject) -> Finding:
    """Checks that copies (deep copy, pickle, state dict) give the same bits after a step of training."""
    model, x = subject.build(dtype=torch.float32).train(), images(subject.size, dtype=torch.float32)
    model(x).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    model.zero_grad()
    want = _seeded(model.eval(), x, 0)
    makers: dict[str, Callable[[nn.Module], Any]] = {
        "a deep copy": copy.deepcopy,
        "a pickle": _pickled,
        "a fresh instance with its state dict": _loaded(subject),
    }
    for name, make in makers.items():
        with at(name):
            got = _seeded(make(model), x, 0)
        if not torch.equal(got, want):
            return failed(f"{name} differs by {relative_error(got, want):.0e}")
    return passed(f"deepcopy, pickle and state dict ({len(model.state_dict())} tensors) are bit-equal after training")


def _pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def _loaded(subject: Subject) -> Callable[[nn.Module], Any]:
    """Returns a function that builds an instance from another seed, and loads a model's state dict."""

    def make(model: nn.Module) -> Any:
        fresh = subject.build(dtype=torch.float32, seed=1)
        fresh.load_state_dict(model.state_dict())
        return fresh

    return make


@torch.no_grad()
def _seeded(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    out: Tensor = model(x)
    return out
