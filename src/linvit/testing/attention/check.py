"""Checks the contract of attention mechanisms (`check_attention`), first the declarations that other checks use."""

import math
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from linvit.analysis.operations import count_operations, kept_for_backward
from linvit.attention.base import Attention, Grid
from linvit.errors import UserError, check_number
from linvit.registry import Spec
from linvit.testing import behaviour
from linvit.testing.attention import host, matrix, packing, precision, shape
from linvit.testing.attention.inputs import NOMINAL, AttentionSubject, inputs
from linvit.testing.report import Check, Contract, Report, at, failed, message, not_declared, require


def declarations(subject: AttentionSubject) -> str:
    """Checks that attributes have allowed values and that methods return values of the documented form."""
    mechanism = subject.build()
    try:
        _check_sizes(mechanism)
        _check_results(mechanism)
    except UserError as error:
        raise failed(message(error)) from error
    changed = [
        f"{field.name}={getattr(table, field.name)!r}"
        for table in (mechanism.host, mechanism.facts)
        for field in fields(table)
        if getattr(table, field.name) != field.default
    ]
    return ", ".join(changed) or "none"


def _check_sizes(mechanism: Attention) -> None:
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
    with at("factors(q, k, grid)"):
        factors = mechanism.factors(given["q"], given["k"], NOMINAL)
    pair = isinstance(factors, tuple) and len(factors) == 2 and all(isinstance(factor, Tensor) for factor in factors)
    _check(factors is None or pair, "factors(q, k, grid)", "two tensors, left and right, or None", factors)


def _check(fits: bool, what: str, allowed: str, given: object) -> None:
    plain = given is None or isinstance(given, (bool, int, float, str))
    require(fits, f"{what} must be {allowed}; got {repr(given) if plain else f'a {type(given).__name__}'}")


SIDES = (28, 56)  # N = 784, 3136
COUNTED = {"O(N)": 1.25, "O(N log N)": 1.4, "O(N^1.5)": 1.75, "O(N^2)": 2.25}
"""Largest exponents of the counts. Counts are exact, and constant parts only lower the exponent; N log N would be 0.14
above N, which is hard to distinguish, and a kernel that grows with the nominal grid adds 0.2."""


def growth_of_work(subject: AttentionSubject) -> str:
    """Checks that operations, and bytes kept for backward, grow as declared, with an instance for each size."""
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
    complexity = mechanism.facts.complexity
    if complexity is None:
        raise not_declared(f"complexity is None; {said}")
    power, said = max(exponents.values(), default=0), f"declared {complexity}; {said}"
    require(power <= COUNTED[complexity], f"{said}; at most N^{COUNTED[complexity]:.2f}")
    linear = power <= COUNTED["O(N)"] and complexity not in ("O(N)", "O(N log N)")
    require(not linear, f"{said}; that is linear, so declare complexity='O(N)'")
    return said


TAKE_THE_SIZE = "it works at 14x14, so take the size from grid and not from the number of tokens"
FOLLOW = "take all sizes from the grid of the call, or refuse it by a linvit.UserError that names it, as 7x9"
HALF = "run the delicate part in float32: put it into core(self, q, k, v, grid), or under @linvit.full_precision"
APART = "sum over the tokens of each image of a Packed (its map_images), or leave packs=False"
AS_MANY = "if keys must be as many as queries, declare same_grid=True"


def _numerics(one: precision.Precision) -> Check:
    advice = HALF if one.dtype.itemsize == 2 else ""
    return Check(f"numerics, {one.name}", precision.numerics(one), advice=advice)


CONTRACT = Contract(
    first=(
        Check("constructor", behaviour.constructor),
        Check("declarations", declarations),
    ),
    clauses=(
        Check("shape and dtype", shape.shape),
        Check("grids", shape.grids, advice=TAKE_THE_SIZE),
        Check("another size", shape.another_size, advice=FOLLOW),
        Check("resizes its tables", shape.resizes_its_tables, refusable=True),
        Check("prefix tokens", host.prefix_tokens, refusable=True),
        Check("spatial reduction", host.spatial_reduction, advice=AS_MANY, refusable=True),
        Check("attention layer", host.attention_layer),
        Check("position bias", host.position_bias),
        Check("masked keys", host.masked_keys),
        Check("packed images", packing.packed_images, advice=APART, refusable=True),
        behaviour.BATCH_INDEPENDENCE,
        *behaviour.COMMON,
        Check("order of tokens", shape.order_of_tokens, advice="declare equivariant=False"),
        Check("equivalent matrix", matrix.equivalent_matrix),
        Check("factors", matrix.factors),
        *map(_numerics, precision.PRECISIONS),
        Check("growth of work", growth_of_work, refusable=True),
    ),
)


def check_attention(
    spec_or_class: Spec | type[Attention], *, quick: bool = False, dim: int = 32, num_heads: int = 2
) -> Report:
    """Checks on the CPU that a mechanism fulfils the contract of `linvit.Attention`.

    It is compared with its own declarations: see `linvit.Host` and `linvit.Facts`. If a declaration cannot be
    read, or `forward` fails, the other checks are not run. Parameters are first moved away from their initial
    values. An exception inside a check, including `sys.exit`, is a failure of that check and is reported where it
    first occurs; a size that a `UserError` rejects is "not supported".

    Args:
        spec_or_class: A registered name, `{name: ..., option: value}`, "package.module:Class", or the class itself.
        quick: Skip the largest numbers of tokens.
        dim: Channels C of the instances.
        num_heads: Heads h of the instances.

    Raises:
        UserError: If there is no such mechanism, or it rejects its options.

    Example:
        >>> from linvit.testing import check_attention
        >>> report = check_attention("focused", quick=True)
        >>> assert report.passed, report
    """
    return CONTRACT.report(AttentionSubject(spec_or_class, dim, num_heads, quick), quick)
