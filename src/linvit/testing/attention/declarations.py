"""The declarations of a mechanism, by which all other checks go; and that its work grows as declared."""

import math
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from linvit.analysis.operations import count_operations, kept_for_backward
from linvit.attention.base import HOST_OPTIONS, Attention, Complexity, Grid
from linvit.errors import UserError, check_choice, check_number
from linvit.testing.attention.inputs import NOMINAL, AttentionSubject, inputs
from linvit.testing.report import Line, at, failed, message, not_declared, passed, refusable

PROJECTIONS = ("qkv", "qv", "kv", "qk")
FLAGS = (
    *("narrow_keys", "fewer_keys", "takes_bias", "takes_input", "channelwise", "linear_in_values", "matrix_is_exact"),
    *("rotary", "equivariant", "exports_any_size"),
)


def declarations(subject: AttentionSubject) -> Line:
    """Checks that attributes have allowed values, and that methods return what the contract says."""
    mechanism = subject.build()
    try:
        _check_attributes(mechanism)
        _check_results(mechanism)
    except UserError as error:
        return failed(message(error))
    flags = [name for name in FLAGS if getattr(mechanism, name)]
    asked = [f"{name} '{getattr(mechanism, name)}'" for name in HOST_OPTIONS if getattr(mechanism, name) != "none"]
    said = [f"projections '{mechanism.projections}'", f"complexity {mechanism.complexity}", *asked, *flags]
    return passed(", ".join(said))


def _check_attributes(mechanism: Attention) -> None:
    check_choice("projections", mechanism.projections, PROJECTIONS)
    for name, allowed in HOST_OPTIONS.items():
        check_choice(name, getattr(mechanism, name), allowed)
    if mechanism.complexity is not None:
        check_choice("complexity", mechanism.complexity, get_args(Complexity))
    for name in FLAGS:
        _check(isinstance(getattr(mechanism, name), bool), name, "True or False", getattr(mechanism, name))
    check_number("out_dim", mechanism.out_dim, at_least=1, whole=True)
    for name, of in (("out_dim", "out_heads"), ("num_heads", "key_heads")):
        width, heads = getattr(mechanism, name), getattr(mechanism, of)
        if width % heads:
            raise UserError(f"{name} {width} is not divisible by {of} {heads}")


@torch.no_grad()
def _check_results(mechanism: Attention) -> None:
    given = inputs(mechanism, NOMINAL)
    with at("forward"):
        out = given(mechanism)
    _check(isinstance(out, Tensor), "what forward returns", "one tensor (B, h, N, out_dim / h)", out)
    with at("rank_bound(grid)"):
        bound = mechanism.rank_bound(NOMINAL)
    check_number("rank_bound(grid)", bound, at_least=1, whole=True)
    with at("factors(q, k, grid)"):
        factors = mechanism.factors(given["q"], given["k"], NOMINAL)
    pair = isinstance(factors, tuple) and len(factors) == 2 and all(isinstance(factor, Tensor) for factor in factors)
    _check(factors is None or pair, "factors(q, k, grid)", "two tensors, left and right, or None", factors)


def _check(fits: bool, what: str, allowed: str, given: object) -> None:
    """Raises a `UserError` unless it fits; numbers and words are sized, of others the type."""
    if not fits:
        plain = given is None or isinstance(given, (bool, int, float, str))
        raise UserError(f"{what} must be {allowed}; got {repr(given) if plain else f'a {type(given).__name__}'}")


SIDES = (28, 56)  # N = 784, 3136
COUNTED = {"O(N)": 1.25, "O(N log N)": 1.4, "O(N^1.5)": 1.75, "O(N^2)": 2.25}
"""Largest exponents of the counts. Counts are exact, and constant parts only lower the exponent; N log N would be 0.14
above N, which can hardly be told from it, and a kernel that grows with the nominal grid adds 0.2."""


@refusable
def growth_of_work(subject: AttentionSubject) -> Line:
    """Checks that operations, and bytes kept for backward, grow as declared.

    Each size has an instance of its own, as in a host: parameters and landmarks may depend on the nominal grid.
    """
    counts: dict[str, list[int]] = {"bytes kept for backward": [], "operations": []}
    for side in SIDES:
        grid = Grid((side, side))
        with at(f"N={side * side}"):
            mechanism = subject.build(grid, torch.float32)
            given = inputs(mechanism, grid, batch=1, dtype=torch.float32)
            arguments, extra = given.arguments
            operations = count_operations(mechanism, *arguments, **extra).total
            kept = kept_for_backward(partial(given.map(lambda x: x.requires_grad_()), mechanism.train()), mechanism)
        for found, count in zip(counts.values(), (kept, operations), strict=True):
            found.append(count)
    grown = (SIDES[1] / SIDES[0]) ** 2
    exponents = {name: math.log(large / few, grown) for name, (few, large) in counts.items() if few and large}
    said = ", ".join(f"{name} ~ N^{power:.2f}" for name, power in exponents.items())
    complexity = mechanism.complexity
    if complexity is None:
        return not_declared(f"complexity is None; {said}")
    power, said = max(exponents.values(), default=0), f"declared {complexity}; {said}"
    if power > COUNTED[complexity]:
        return failed(f"{said}; at most N^{COUNTED[complexity]:.2f}")
    if complexity not in ("O(N)", "O(N log N)") and power <= COUNTED["O(N)"]:
        return failed(f"{said}; that is linear, so declare complexity = 'O(N)'")
    return passed(said)
