"""What a mechanism does with views and with NaN."""

import torch

from linvit.testing.attention.inputs import NOMINAL, AttentionSubject, inputs
from linvit.testing.numbers import EXACT, relative_error
from linvit.testing.report import Line, at, failed, passed


def memory_layout(subject: AttentionSubject) -> Line:
    """Checks that views of a fused projection give the same as contiguous tensors."""
    mechanism = subject.build()
    given = inputs(mechanism, NOMINAL)
    views = given.map(lambda x: x.transpose(1, -1).contiguous().transpose(1, -1))
    error = relative_error(views(mechanism), given(mechanism))
    said = f"contiguous or not: {error:.0e}"
    return passed(said) if error <= EXACT else failed(f"{said} (at most {EXACT:.0e})")


def nan_propagates(subject: AttentionSubject) -> Line:
    """Checks that a NaN in an input comes out as NaN, in its own sample alone, and that the backward pass runs."""
    mechanism = subject.build()
    given = inputs(mechanism, NOMINAL)
    clean = given(mechanism).detach()
    counts = {}
    for name, tensor in given.named.items():
        for every in (False, True):
            spoilt = tensor.clone()
            spoilt[0].fill_(torch.nan) if every else spoilt[0].view(-1)[:1].fill_(torch.nan)
            with at(f"{'all' if every else 'a'} NaN in {name}"):
                out = given.replace(name, spoilt).map(lambda x: x.requires_grad_())(mechanism)
                out.sum().backward()
            counts[name] = int(out[0].isnan().sum())
            if not counts[name]:
                return failed(f"a NaN in {name} disappears")
            if not relative_error(out[1], clean[1]) <= EXACT:
                return failed(f"a NaN in {name} of one sample changes another sample")
    return passed(", ".join(f"NaN in {name} gives {count}" for name, count in counts.items()))
