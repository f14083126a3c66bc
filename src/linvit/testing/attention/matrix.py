"""What a mechanism says of its equivalent matrix: that there is one, its factors, its rank."""

import torch
from torch import Tensor

from linvit.analysis.attention_matrix import attention_matrix
from linvit.analysis.rank import rank
from linvit.attention.base import Attention
from linvit.testing.attention.behaviour import neighbours_effect
from linvit.testing.attention.inputs import EXACT, NOMINAL, Inputs, Subject, inputs, relative_error
from linvit.testing.report import Finding, at, failed, not_declared, passed

NEGLIGIBLE = 1e-10
"""Singular values below this share of the largest are rounding. The products of float64 leave 1e-15 and an inverse by
iteration up to 1e-12, while a mechanism above its bound has singular values of 1e-3 there."""
ROUNDED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def equivalent_matrix(subject: Subject) -> Finding:
    """`M v + bias` is the output, with M read off by probing as the declarations say."""
    mechanism = subject.build()
    given = inputs(mechanism, NOMINAL)
    if not mechanism.probeable:
        return _own_matrix(mechanism, given)
    bias = _with_values(mechanism, given, torch.zeros_like(given.v))
    out = given(mechanism, NOMINAL)
    error = relative_error(_mixed(mechanism, given) + bias, out)
    if not error <= EXACT:
        return failed(
            f"M v + bias differs from the output by {error:.0e} (at most {EXACT:.0e}): {_why(mechanism, given)}"
        )
    if mechanism.channelwise and mechanism.head_dim > 1:
        matrix = _matrix(mechanism, given)
        if relative_error(matrix[:, :, :1].expand_as(matrix), matrix) <= EXACT:
            return failed("declared channelwise, but all channels have one matrix: leave channelwise out")
    kind = "one per channel" if mechanism.channelwise else "one per head"
    return passed(f"M v + bias differs from the output by {error:.0e}, {kind}")


def factors(subject: Subject) -> Finding:
    """`left @ right.mT` is the equivalent matrix."""
    mechanism = subject.build()
    given = inputs(mechanism, NOMINAL)
    found = mechanism.factors(given.q, given.k, NOMINAL)
    if found is None:
        return not_declared("factors(q, k, grid) gives None")
    left, right = found
    product, matrix = left @ right.mT, _matrix(mechanism, given)
    if product.shape != matrix.shape:
        return failed(f"left @ right.mT is {tuple(product.shape)}, the equivalent matrix {tuple(matrix.shape)}")
    error = relative_error(product, matrix)
    said = f"{left.shape[-1]} columns, product and equivalent matrix differ by {error:.0e}"
    return passed(said) if error <= EXACT else failed(f"{said} (at most {EXACT:.0e})")


def rank_bound(subject: Subject) -> Finding:
    """The rank stays within the declared bound for queries and keys rounded to every precision."""
    mechanism = subject.build()
    bound = mechanism.rank_bound(NOMINAL)
    if type(mechanism).rank_bound is Attention.rank_bound:
        return not_declared(f"rank_bound(grid) is the {bound} of any matrix")
    if not mechanism.probeable and not hasattr(mechanism, "attention_matrix"):
        return not_declared("no attention_matrix to measure")
    ranks = {}
    for dtype in ROUNDED:
        given = inputs(mechanism, NOMINAL, batch=1).map(lambda x, dtype=dtype: x.to(dtype).double())  # type: ignore[misc]
        name = str(dtype).removeprefix("torch.")
        with at(f"{name} inputs"):
            ranks[name] = float(rank(_matrix(mechanism, given), NEGLIGIBLE).max())
    measured = ", ".join(f"{value:g} ({name})" for name, value in ranks.items())
    said = f"measured {measured}, declared at most {bound}"
    return passed(said) if all(value <= bound for value in ranks.values()) else failed(said)


def _own_matrix(mechanism: Attention, given: Inputs) -> Finding:
    """The matrix of a mechanism that cannot be probed: finite, and on the tokens of the call."""
    if not hasattr(mechanism, "attention_matrix"):
        return not_declared("probeable is False, and there is no attention_matrix(q, k, v, grid)")
    matrix = _matrix(mechanism, given)
    if matrix.shape[0] != len(given.v) or matrix.shape[-2:] != (NOMINAL.num_queries, NOMINAL.num_keys):
        return failed(f"attention_matrix gives {tuple(matrix.shape)}, which does not end in (N, M) or begin with B")
    if not matrix.isfinite().all():
        return failed(f"attention_matrix has {int((~matrix.isfinite()).sum())} entries that are not finite")
    return passed(f"its own, {tuple(matrix.shape)} (probeable is False)")


def _matrix(mechanism: Attention, given: Inputs) -> Tensor:
    return attention_matrix(mechanism, given.q, given.k, NOMINAL, v=given.v, **given.extra)


def _mixed(mechanism: Attention, given: Inputs) -> Tensor:
    """`M v`, (B, h, N, d)."""
    matrix = _matrix(mechanism, given)
    if not mechanism.channelwise:
        return matrix @ given.v
    return (matrix @ given.v.mT.unsqueeze(-1)).squeeze(-1).mT  # (B, h, d, N, M) by (B, h, d, M, 1)


@torch.no_grad()
def _with_values(mechanism: Attention, given: Inputs, v: Tensor) -> Tensor:
    return given._replace(v=v)(mechanism, NOMINAL)


def _why(mechanism: Attention, given: Inputs) -> str:
    """What the mechanism ought to mend or to have declared. Probing is for what repeats, sample by sample."""
    once, again = (_with_values(mechanism, given, given.v) for _ in range(2))
    if not relative_error(again, once) <= EXACT:
        return "two calls in evaluation differ, so mend determinism first"
    if not neighbours_effect(mechanism, given) <= EXACT:
        return "a sample's output depends on the others of its batch, so mend batch independence first"
    bias, once, twice = (_with_values(mechanism, given, factor * given.v) for factor in (0, 1, 2))
    if not relative_error(twice - bias, 2 * (once - bias)) <= EXACT:
        return "not linear in v, so declare probeable = False"
    if not mechanism.channelwise:
        mechanism.channelwise = True
        if relative_error(_mixed(mechanism, given) + bias, once) <= EXACT:
            return "the matrix differs per channel, so declare channelwise = True"
    return "channels of v are mixed, so declare probeable = False"
