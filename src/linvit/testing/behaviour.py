"""Checks construction, repeated calls, independence of samples, training and copies, for all subjects."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from linvit.testing.numbers import relative_error, trainable, worst
from linvit.testing.report import Check, at, failed, judged, require
from linvit.testing.subject import Given, Subject

RATE = 1e-2
LISTED = 8
UNSET = inspect.Parameter.empty


def constructor(subject: Subject) -> str:
    """Checks arguments, members and defaults, listing all missing ones at once, and the type of the result."""
    lacking = {name: use for name, use in subject.arguments.items() if not subject.takes(name)}
    own = {name: default for name, default in subject.parameters.items() if name not in subject.arguments}
    bare = [name for name, default in own.items() if default is UNSET and name not in subject.options]
    require(lacking or not bare, f"no host supplies {', '.join(bare)}: give it a default")
    model = subject.model if all(map(subject.takes, subject.supplied)) else None
    members = dict(subject.methods)
    if model is not None:
        members = {**subject.attributes, **members}
    elif not isinstance(subject.constructor, type):
        members = {}
    owner = subject.constructor if model is None else subject.part(model)
    absent = {name: use for name, use in members.items() if not hasattr(owner, name)}
    said = [
        f"{what} no {', '.join(f'{name} ({use})' for name, use in missing.items())}"
        for what, missing in (("its constructor takes", lacking), ("it has", absent))
        if missing
    ]
    require(not said, f"{'; '.join(said)}. {subject.base} has all members to inherit")
    for name, want in subject.defaults.items():
        found = subject.parameters.get(name, want)
        default = "no default" if found is UNSET else f"the default {found!r}"
        require(found == want, f"{name} has {default} instead of {want!r}")
    subject.check_kind(owner)
    return ", ".join(f"{name}={default!r}" for name, default in own.items()) or "no options"


@torch.no_grad()
def determinism(subject: Subject) -> str:
    """Checks that evaluation is repeatable, stores nothing and does not write to inputs; training repeats by seed."""
    model = subject.build()
    given = subject.inputs(model)
    before, state, attributes = given.map(torch.clone), copy.deepcopy(model.state_dict()), set(vars(model))
    first = outputs(model, given, 0)
    written = [name for name, tensor in given.named.items() if not torch.equal(tensor, before.named[name])]
    require(not written, f"it writes to its input {', '.join(written)}")
    _require_equal(outputs(model, given, 1), first, "two calls in evaluation differ")
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])]
    require(not changed, f"a call in evaluation changes its state: {', '.join(changed)}")
    added = sorted(set(vars(model)) - attributes)
    require(not added, f"a call in evaluation leaves attributes behind: {', '.join(added)}")
    first, second = (in_training(model, given, 0) for _ in range(2))
    _require_equal(second, first, "two calls in training with one seed differ")
    return "two calls in evaluation are bit-equal"


def batch_independence(subject: Subject) -> str:
    """Checks that a sample gives the same alone and among others of another scale, if required also in training."""
    model = subject.build()
    given = subject.neighbours(model)
    errors = {"in evaluation": neighbours_effect(model, given)}
    if subject.independent_in_training:
        if _equal(*(in_training(model, given, seed) for seed in (0, 1))):
            errors["in training"] = neighbours_effect(model, given, training=True)
        else:
            errors["in training, at one seed among others"] = _other_neighbours_effect(model, given)
    said = ", ".join(f"{error:.0e} {mode}" for mode, error in errors.items())
    largest = worst(errors.values())
    return judged(largest, f"alone and among neighbours of another scale, a sample's outputs differ by {said}")


@torch.no_grad()
def neighbours_effect(model: nn.Module, given: Given, training: bool = False) -> float:
    """Returns the largest relative difference between a sample's outputs alone and in the batch."""
    run = in_training if training else outputs
    together = run(model, given, 0)
    errors = []
    for i in range(len(together[0])):
        alone = run(model, given.map(lambda x, i=i: x[i : i + 1]), 0)  # type: ignore[misc]
        for out, whole in zip(alone, (x[i : i + 1] for x in together), strict=True):
            # Samples that are NaN also when alone are the subject of other checks.
            both = out.isnan() & whole.isnan()
            errors.append(relative_error(torch.where(both, 0, whole), out.nan_to_num(0)))
    return worst(errors)


def gradients(subject: Subject) -> str:
    """Checks that a finite, nonzero gradient reaches every input and every parameter in training."""
    missing: dict[str, str] = {}
    count = 0
    for tried, (found, may_be_zero) in enumerate(subject.gradients()):
        infinite = {name: "not finite" for name, x in found.items() if x is not None and not x.isfinite().all()}
        lost = {
            name: "none" if x is None else "all 0"
            for name, x in found.items()
            if x is None or not (name in may_be_zero or x.any())
        }
        missing = infinite or {name: why for name, why in lost.items() if not tried or name in missing}
        count = len(found)
        if infinite or not missing:
            break
    if not missing:
        return f"{count} inputs and parameters"
    listed = [f"{name} ({why})" for name, why in missing.items()]
    more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    raise failed(f"gradient missing: {', '.join(listed[:LISTED])}{more}")


def copies(subject: Subject) -> str:
    """Checks that copies (deep copy, pickle, state dict) give the same bits after a training step."""
    model = subject.build()
    given = subject.inputs(model)
    with at("a step of training"):
        found = given.map(lambda x: x.clone().requires_grad_())(model.train())
        torch.stack([x.square().mean() for x in _tensors(found)]).sum().backward()
        with torch.no_grad():
            for parameter in trainable(model).values():
                parameter -= 0 if parameter.grad is None else RATE * parameter.grad
    model.eval().zero_grad()
    makers: dict[str, Callable[[], Any]] = {
        "a deep copy": lambda: copy.deepcopy(model),
        "a fresh instance with its state dict": lambda: _loaded(subject.build(seed=1), model),
    }
    if subject.picklable:
        makers["a pickle"] = lambda: pickle.loads(pickle.dumps(model))
    want = outputs(model, given, 0)
    for name, make in makers.items():
        with at(name):
            got = outputs(make(), given, 0)
        _require_equal(got, want, f"{name} differs")
    return f"{', '.join(makers)} ({len(model.state_dict())} tensors) give the same bits after training"


BATCH_INDEPENDENCE = Check("batch independence", batch_independence)
COMMON = (Check("gradients", gradients), Check("determinism", determinism), Check("copies", copies))


@torch.no_grad()
def outputs(model: Callable[..., Any], given: Given, seed: int) -> list[Tensor]:
    """Returns all output tensors of a call at a seed."""
    torch.manual_seed(seed)
    return _tensors(given(model))


def in_training(model: nn.Module, given: Given, seed: int) -> list[Tensor]:
    """Returns the outputs of a copy in training mode, since training may change the state."""
    return outputs(copy.deepcopy(model).train(), given, seed)


def _other_neighbours_effect(model: nn.Module, given: Given) -> float:
    """Returns the relative change of the first sample's outputs in training when all others change, at one seed."""
    others = given.map(lambda x: torch.cat([x[:1], 1 - 2 * x[1:]]))
    before, after = ([x[:1] for x in in_training(model, batch, 0)] for batch in (given, others))
    return _difference(after, before)


def _loaded(fresh: nn.Module, model: nn.Module) -> nn.Module:
    fresh.load_state_dict(model.state_dict())
    return fresh


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def _equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _require_equal(got: list[Tensor], want: list[Tensor], differing: str) -> None:
    if not _equal(got, want):
        raise failed(f"{differing} by {_difference(got, want):.0e}")


def _difference(got: list[Tensor], want: list[Tensor]) -> float:
    return worst(relative_error(a, b) for a, b in zip(got, want, strict=True))
