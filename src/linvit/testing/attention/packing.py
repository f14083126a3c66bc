"""Packed images: each gets what it gets alone, and none sees another."""

from collections.abc import Callable

import torch
from torch import Tensor

from linvit.attention.base import Attention, Grid, Packed
from linvit.testing.attention.inputs import AttentionSubject, Inputs, inputs
from linvit.testing.numbers import gradients_of, relative_error, sortable, trainable
from linvit.testing.report import failed, judged

PACKED = Packed([(3, 4), (5, 2), (9, 8), (3, 4)], num_prefix=1)
ALONE = 1e-12
"""Relative tolerance in float64: sums are the same but for their order."""
Found = dict[str, Tensor | None]


def packed_images(subject: AttentionSubject) -> str:
    """Checks that images of several sizes in one row get what those of each size get alone, and never mix.

    Another image in the place of the first must leave every bit of the others' outputs and gradients as it was.
    """
    mechanism = subject.build(Grid((14, 14), num_prefix=1))
    groups = [inputs(mechanism, grid, batch=n) for grid, n in PACKED.groups]
    row = Inputs(
        PACKED.groups[0][0], **{name: PACKED.join([one.named[name] for one in groups]) for name in groups[0].named}
    )
    packed, alone = (_outputs_and_gradients(mechanism, row, call) for call in (_packed, _by_size))
    errors = {name: _difference(packed[name], want) for name, want in alone.items()}
    worst = max(errors, key=lambda name: sortable(errors[name]))
    said = judged(errors[worst], f"{worst} differs by {errors[worst]:.0e} from that of each size alone", ALONE)
    first = PACKED.lengths[0]
    other = row.map(torch.clone)
    for x in other.named.values():
        x[..., :first, :] = 1 - 2 * x[..., :first, :]
    after = _outputs_and_gradients(mechanism, other, _packed)
    for name in ("the output", *row.named):
        before, now = packed[name], after[name]
        if before is not None and not (now is not None and torch.equal(before[..., first:, :], now[..., first:, :])):
            raise failed(
                f"another image in a pack changes {name}{' (its gradient)' * (name in row.named)} of the others"
            )
    return f"{said}{'' if mechanism.facts.packs else ', one size after the other'}"


def _packed(mechanism: Attention, row: Inputs) -> Tensor:
    extra = row.arguments[1]
    return mechanism(row["q"], row["k"], row["v"], PACKED, **extra)


def _by_size(mechanism: Attention, row: Inputs) -> Tensor:
    """Calls the mechanism with the images of each size alone, and joins its outputs, (1, h, T, d)."""
    parts = {name: PACKED.split(x) for name, x in row.named.items()}
    alone = [
        Inputs(grid, **{name: part[i] for name, part in parts.items()}) for i, (grid, _) in enumerate(PACKED.groups)
    ]
    return PACKED.join([given(mechanism) for given in alone])


def _outputs_and_gradients(mechanism: Attention, row: Inputs, call: Callable[[Attention, Inputs], Tensor]) -> Found:
    leaves = row.map(lambda x: x.clone().requires_grad_())
    out = call(mechanism, leaves)
    return {"the output": out.detach(), **gradients_of(out, leaves.named | trainable(mechanism))}


def _difference(got: Tensor | None, want: Tensor | None) -> float:
    if got is None or want is None:
        return 0.0 if got is want else float("nan")
    return relative_error(got, want)
