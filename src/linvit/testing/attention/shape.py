"""Shapes, grids, prefix tokens, position bias, and the host."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.errors import UserError
from linvit.layers.attention_layer import AttentionLayer
from linvit.testing.attention.inputs import EXACT, NOMINAL, Inputs, Subject, inputs, normal, relative_error, shown
from linvit.testing.report import CRASHES, Finding, at, crash, failed, not_supported, passed, place, refusable

GRIDS = [Grid((14, 14)), Grid((7, 9)), Grid((1, 50)), Grid((50, 1)), Grid((13, 31))]
WITH_PREFIX = Grid((14, 14), num_prefix=2)
REDUCED = Grid((14, 14), (7, 7))
SEEN = 1e-7
"""Least relative change of an output that sees a changed token: unit weights on hundreds of keys give 1e-3, and what is
left in float64 when it does not see it is 1e-16."""


def shape(subject: Subject) -> Finding:
    """(B, h, N, out_dim / h) in the values' dtype, for a batch and for one image, in every precision."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        mechanism = subject.build(dtype=dtype)
        for batch in (1, 3):
            out = inputs(mechanism, NOMINAL, batch=batch, dtype=dtype)(mechanism, NOMINAL)
            wrong = wrong_shape(out, mechanism, NOMINAL, batch)
            if wrong:
                return failed(wrong)
            if out.dtype != dtype:
                return failed(f"{_name(dtype)} in, {_name(out.dtype)} out")
    return passed(f"{tuple(out.shape)} for 3 images of {shown(NOMINAL)} in 4 dtypes")


def grids(subject: Subject) -> Finding:
    """An instance for each grid: square or not, one row, one column, odd sides."""
    refused = []
    for grid in GRIDS:
        try:
            wrong = _wrong_output(subject.build(grid), grid)
        except UserError as error:
            refused.append(f"{shown(grid)}: {place(error)}")
            continue
        if wrong:
            return failed(f"{wrong} at {shown(grid)}")
    return not_supported("; ".join(refused)) if refused else passed(", ".join(map(shown, GRIDS)))


def another_size(subject: Subject) -> Finding:
    """One instance at every grid, and at its own again: it follows, or says that it cannot."""
    mechanism = subject.build()
    given = inputs(mechanism, NOMINAL)
    before = given(mechanism, NOMINAL)
    refused = []
    for grid in GRIDS[1:]:
        try:
            wrong = _wrong_output(mechanism, grid)
        except UserError as error:
            refused.append(f"{shown(grid)}: {place(error)}")
            continue
        if wrong:
            return failed(f"{wrong} at {shown(grid)} of an instance for {shown(NOMINAL)}")
    left = relative_error(given(mechanism, NOMINAL), before)
    if not left <= EXACT:
        return failed(f"calls at other sizes change the output at {shown(NOMINAL)} by {left:.0e} (at most {EXACT:.0e})")
    sizes = ", ".join(map(shown, GRIDS[1:]))
    return not_supported("; ".join(refused)) if refused else passed(f"{sizes} through an instance for {shown(NOMINAL)}")


@refusable
def prefix_tokens(subject: Subject) -> Finding:
    """Patches see every prefix token, and every prefix token sees the patches."""
    grid, prefix = WITH_PREFIX, WITH_PREFIX.num_prefix
    mechanism = subject.build(grid)
    given = inputs(mechanism, grid)
    before = given(mechanism, grid)
    wrong = wrong_shape(before, mechanism, grid, 2)
    if wrong:
        return failed(f"{wrong} at {shown(grid)}")
    effects = {}
    for token in range(prefix):
        moved = _change(mechanism, given, before, slice(token, token + 1))
        effects[f"of prefix token {token} on patches"] = moved[prefix:]
    on_prefix = _change(mechanism, given, before, slice(prefix, None))
    for token in range(prefix):
        effects[f"of the patches on prefix token {token}"] = on_prefix[token : token + 1]
    least = min(effects, key=lambda name: float(effects[name].max()))
    size = float(effects[least].max())
    return passed(f"least effect {size:.0e}") if size > SEEN else failed(f"the effect {least} is {size:.0e}")


@refusable
def spatial_reduction(subject: Subject) -> Finding:
    """Fewer keys than queries."""
    mechanism = subject.build()
    if mechanism.projections != "qkv":
        return not_supported("the projections tie keys to queries")
    if not mechanism.fewer_keys:
        return not_supported("fewer_keys is False")
    wrong = _wrong_or_crash(partial(subject.build, REDUCED), REDUCED)
    if wrong:
        return failed(f"{wrong} at {shown(REDUCED)}; if keys must be as many as queries, declare fewer_keys = False")
    return passed(shown(REDUCED))


@refusable
def narrow_keys(subject: Subject) -> Finding:
    """Queries and keys of half the width, where the constructor takes `key_dim`."""
    if not subject.takes("key_dim"):
        return not_supported("the constructor takes no key_dim")
    if not subject.build().narrow_keys:
        return not_supported("narrow_keys is False")
    width = max(1, subject.dim // subject.num_heads // 2)
    narrow = partial(subject.build, key_dim=width)
    wrong = _wrong_or_crash(narrow, NOMINAL)
    if not wrong and narrow().key_dim != width:
        wrong = "the attribute key_dim is another"
    if wrong:
        return failed(f"{wrong} with key_dim={width}; if keys must be as wide as values, declare narrow_keys = False")
    return passed(f"key_dim={width}")


def position_bias(subject: Subject) -> Finding:
    """A bias on the logits changes the output and gets a gradient, where the mechanism takes one."""
    mechanism = subject.build()
    if not mechanism.takes_bias:
        return not_supported("takes_bias is False")
    given = inputs(mechanism, NOMINAL)
    bias = normal(1, mechanism.num_heads, NOMINAL.num_queries, NOMINAL.num_keys, seed=5).requires_grad_()
    out = given._replace(extra={**given.extra, "bias": bias})(mechanism, NOMINAL)
    effect = relative_error(out, given(mechanism, NOMINAL))
    (gradient,) = torch.autograd.grad(out, bias, normal(*out.shape, seed=6), allow_unused=True)
    if gradient is None or not gradient.isfinite().all() or not gradient.any():
        return failed("no finite gradient reaches the bias")
    return passed(f"its effect is {effect:.0e}") if effect > SEEN else failed(f"its effect is {effect:.0e}")


def attention_layer(subject: Subject) -> Finding:
    """The host builds it, feeds it by its declarations, and gets gradients everywhere."""
    if subject.hosted is None:
        return not_supported("no package.module:Class leads to this class, so the layer cannot find it")
    layer = AttentionLayer(subject.dim, subject.num_heads, NOMINAL, attention=subject.hosted).double()
    x = normal(2, NOMINAL.num_queries, subject.dim, seed=5).requires_grad_()
    out = layer(x, NOMINAL)
    if out.shape != x.shape:
        return failed(f"{tuple(x.shape)} in, {tuple(out.shape)} out")
    out.backward(normal(*out.shape, seed=6))
    tensors = {"the input": x, **{name: p for name, p in layer.named_parameters() if ".mechanism" not in f".{name}"}}
    without = [name for name, tensor in tensors.items() if tensor.grad is None or not tensor.grad.isfinite().all()]
    if without:
        return failed(f"no finite gradient reaches {', '.join(without)}")
    return passed(f"{tuple(x.shape)}, projections '{layer.mechanism.projections}', out_dim {layer.mechanism.out_dim}")


def wrong_shape(out: Tensor, mechanism: Attention, grid: Grid, batch: int) -> str:
    """What is wrong with an output's shape, or nothing."""
    heads = mechanism.num_heads
    want = (batch, heads, grid.num_queries, mechanism.out_dim // heads)
    return "" if tuple(out.shape) == want else f"shape {tuple(out.shape)} instead of {want}"


def _wrong_output(mechanism: Attention, grid: Grid) -> str:
    with at(shown(grid)):
        out = inputs(mechanism, grid)(mechanism, grid)
    wrong = wrong_shape(out, mechanism, grid, 2)
    lost = int((~out.isfinite()).sum())
    return wrong or (f"{lost} of {out.numel()} outputs not finite" if lost else "")


def _wrong_or_crash(build: Callable[[], Attention], grid: Grid) -> str:
    """What is wrong with the output of an instance for a grid, a crash included, or nothing."""
    try:
        return _wrong_output(build(), grid)
    except UserError:
        raise
    except CRASHES as error:
        return crash(error).note


def _change(mechanism: Attention, given: Inputs, before: Tensor, tokens: slice) -> Tensor:
    """How much each token's output moves, relative to the largest, when other tokens come in, (N,)."""

    def exchange(tensor: Tensor) -> Tensor:
        # Tokens are dimension 2 of (B, h, N, d) and dimension 1 of x (B, N, C).
        tensor = tensor.clone()
        view = tensor if tensor.ndim == 3 else tensor.transpose(1, 2)
        view[:, tokens] = normal(*view[:, tokens].shape, seed=7).to(tensor.dtype)
        return tensor

    after = given.map(exchange)(mechanism, WITH_PREFIX)
    return (after - before).abs().amax((0, 1, 3)) / before.abs().max()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
