"""The behaviour of a mechanism from call to call, from sample to sample, and in copies."""

import copy
import math
import pickle
from collections.abc import Callable

import torch
from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.testing.attention.inputs import EXACT, NOMINAL, Inputs, Subject, flat, inputs, normal, relative_error
from linvit.testing.report import Finding, at, failed, passed

NEIGHBOURS = (1.0, 2.0**-4, 2.0**4, 1.0)  # their scales; the last is flat: all its tokens are alike


def batch_independence(subject: Subject) -> Finding:
    """Checks that a sample gives the same alone and among others of another scale, in evaluation and in training."""
    mechanism = subject.build()
    scales = torch.tensor(NEIGHBOURS, dtype=torch.float64)
    given = inputs(mechanism, NOMINAL, batch=len(scales)).map(lambda x: x * scales.view(-1, *[1] * (x.ndim - 1)))
    given = given.map(lambda x: torch.cat([x[:-1], flat(x[-1:])]))
    errors = {"in evaluation": neighbours_effect(mechanism, given, NOMINAL)}
    if torch.equal(*(_in_training(mechanism, given, seed) for seed in (0, 1))):
        errors["in training"] = neighbours_effect(mechanism, given, NOMINAL, training=True)
        note = ""
    else:
        errors["in training, at one seed among others"] = _other_neighbours_effect(mechanism, given)
        note = "; random in training, so compared there at one seed among others"
    worst = max(errors, key=lambda mode: math.inf if math.isnan(errors[mode]) else errors[mode])
    numbers = (
        f"alone and among neighbours of {min(NEIGHBOURS):g} to {max(NEIGHBOURS):g} times its scale, one of them flat"
    )
    if not errors[worst] <= EXACT:
        return failed(f"{numbers}, a sample's outputs differ by {errors[worst]:.0e} {worst} (at most {EXACT:.0e})")
    return passed(f"{errors[worst]:.0e} {numbers}{note}")


@torch.no_grad()
def neighbours_effect(mechanism: Attention, given: Inputs, grid: Grid, training: bool = False) -> float:
    """Returns the largest relative difference between a sample's outputs alone and in the batch."""

    def run(given: Inputs) -> Tensor:
        return _in_training(mechanism, given, 0) if training else given(mechanism, grid)

    together = run(given)
    alone = [run(given.map(lambda x, i=i: x[i : i + 1])) for i in range(len(together))]  # type: ignore[misc]
    # What is NaN alone as well concerns other checks.
    errors = [
        relative_error(torch.where(out.isnan() & whole.isnan(), 0, whole), out.nan_to_num(0))
        for out, whole in zip(alone, together.split(1), strict=True)
    ]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def gradients(subject: Subject) -> Finding:
    """Checks that in training a finite gradient that is not 0 reaches every input and every parameter."""
    mechanism = subject.build().train()
    given = inputs(mechanism, NOMINAL).map(lambda x: x.requires_grad_())
    tensors = given.named | {name: p for name, p in mechanism.named_parameters() if p.requires_grad}
    out = given(mechanism, NOMINAL)
    found = torch.autograd.grad(out, list(tensors.values()), normal(*out.shape, seed=8), allow_unused=True)
    lost = {
        name: g for name, g in zip(tensors, found, strict=True) if g is None or not g.isfinite().all() or not g.any()
    }
    if not lost:
        return passed(f"inputs {', '.join(given.named)} and {len(tensors) - len(given.named)} parameters")
    said = (
        f"{name} ({'none' if g is None else 'all 0' if g.isfinite().all() else 'not finite'})"
        for name, g in lost.items()
    )
    return failed(f"gradient missing: {', '.join(said)}")


def determinism(subject: Subject) -> Finding:
    """Checks that evaluation uses no random numbers, keeps nothing, and does not write to its inputs."""
    mechanism = subject.build()
    given = inputs(mechanism, NOMINAL)
    kept, state, attributes = given.map(torch.clone), copy.deepcopy(mechanism.state_dict()), set(vars(mechanism))
    first = _seeded(mechanism, given, 0)
    written = [name for name, tensor in given.named.items() if not torch.equal(tensor, kept.named[name])]
    if written:
        return failed(f"it writes to its input {', '.join(written)}")
    second = _seeded(mechanism, given, 1)
    if not torch.equal(first, second):
        return failed(f"two calls in evaluation differ by {relative_error(second, first):.0e}")
    changed = [name for name, tensor in mechanism.state_dict().items() if not torch.equal(tensor, state[name])]
    if changed:
        return failed(f"a call in evaluation changes its state: {', '.join(changed)}")
    kept_back = set(vars(mechanism)) - attributes
    if kept_back:
        return failed(f"a call in evaluation leaves attributes behind: {', '.join(sorted(kept_back))}")
    return passed("two calls in evaluation are bit-equal")


def copies(subject: Subject) -> Finding:
    """Checks that copies (deep copy, pickle, state dict) give the same bits after a pass of training."""
    mechanism = subject.build()
    given = inputs(mechanism, NOMINAL)
    with at("a training pass"):
        given.map(lambda x: x.clone().requires_grad_())(mechanism.train(), NOMINAL).square().mean().backward()
    mechanism.eval().zero_grad()
    want = _seeded(mechanism, given, 0)
    fresh = subject.build(seed=1)
    fresh.load_state_dict(mechanism.state_dict())
    makers: dict[str, Callable[[], Attention]] = {
        "a deep copy": lambda: copy.deepcopy(mechanism),
        "a fresh instance with its state dict": lambda: fresh,
    }
    if subject.hosted is not None:  # pickle finds a class by its path, too
        makers["a pickle"] = lambda: pickle.loads(pickle.dumps(mechanism))
    for name, make in makers.items():
        with at(name):
            got = _seeded(make(), given, 0)
        if not torch.equal(got, want):
            return failed(f"{name} differs by {relative_error(got, want):.0e}")
    return passed(f"{', '.join(makers)} ({len(mechanism.state_dict())} tensors) give the same bits after training")


def memory_layout(subject: Subject) -> Finding:
    """Checks that views of a fused projection give the same as contiguous tensors."""
    mechanism = subject.build()
    given = inputs(mechanism, NOMINAL)
    views = given.map(lambda x: x.transpose(1, -1).contiguous().transpose(1, -1))
    error = relative_error(views(mechanism, NOMINAL), given(mechanism, NOMINAL))
    said = f"contiguous or not: {error:.0e}"
    return passed(said) if error <= EXACT else failed(f"{said} (at most {EXACT:.0e})")


def nan_propagates(subject: Subject) -> Finding:
    """Checks that a NaN in an input comes out as NaN, in its own sample alone, and that the backward pass runs."""
    mechanism = subject.build()
    given = inputs(mechanism, NOMINAL)
    clean = given(mechanism, NOMINAL).detach()
    counts = {}
    for name, tensor in given.named.items():
        for every in (False, True):
            spoilt = tensor.clone()
            spoilt[0].fill_(torch.nan) if every else spoilt[0].view(-1)[:1].fill_(torch.nan)
            with at(f"{'all' if every else 'a'} NaN in {name}"):
                out = given.replace(name, spoilt).map(lambda x: x.requires_grad_())(mechanism, NOMINAL)
                out.sum().backward()
            counts[name] = int(out[0].isnan().sum())
            if not counts[name]:
                return failed(f"a NaN in {name} disappears")
            if not relative_error(out[1], clean[1]) <= EXACT:
                return failed(f"a NaN in {name} of one sample changes another sample")
    return passed(", ".join(f"NaN in {name} gives {count}" for name, count in counts.items()))


def _other_neighbours_effect(mechanism: Attention, given: Inputs) -> float:
    """Returns the relative difference of the first sample's output in training when all others change.

    The seed and the size of the batch stay, and with them the random numbers that the sample gets.
    """
    others = given.map(lambda x: torch.cat([x[:1], 1 - 2 * x[1:]]))
    before, after = (_in_training(mechanism, batch, 0)[:1] for batch in (given, others))
    return relative_error(after, before)


def _in_training(mechanism: Attention, given: Inputs, seed: int) -> Tensor:
    """Returns the output of a copy in training mode: training may change the state."""
    return _seeded(copy.deepcopy(mechanism).train(), given, seed)


@torch.no_grad()
def _seeded(mechanism: Attention, given: Inputs, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return given(mechanism, NOMINAL)
