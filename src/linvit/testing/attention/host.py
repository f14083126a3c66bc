"""Checks for hosts: prefix tokens, fewer keys, a position bias, masked keys, use in a layer."""

import torch
from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.layers.attention_layer import AttentionLayer
from linvit.layers.spatial_reduction import reducible
from linvit.testing.attention.inputs import NOMINAL, AttentionSubject, Inputs, inputs
from linvit.testing.attention.shape import check_output
from linvit.testing.numbers import normal, relative_error
from linvit.testing.report import failed, judged, not_supported, require
from linvit.testing.subject import sized

WITH_PREFIX = (Grid((14, 14), num_prefix=2), Grid((4, 6), num_prefix=5))
REDUCED = (Grid((14, 14), (7, 7)), Grid((6, 8), (3, 4), num_prefix=1))
SEEN = 1e-7
"""Minimum relative change of an output that depends on a changed token: unit weights on hundreds of keys give 1e-3,
and an independent output changes by 1e-16 in float64."""


def prefix_tokens(subject: AttentionSubject) -> str:
    """Checks that every patch depends on every prefix token, and every prefix token on the patches.

    For a mechanism that `fades`, one patch is enough.
    """
    least = {}
    for grid in WITH_PREFIX:
        mechanism = subject.build(grid)
        check_output(mechanism, grid)
        prefix, patches = slice(grid.num_prefix), slice(grid.num_prefix, None)
        pairs = {f"of prefix token {i} on patches": (slice(i, i + 1), patches) for i in range(grid.num_prefix)}
        pairs["of the patches on a prefix token"] = (patches, prefix)
        given = inputs(mechanism, grid)
        over_patches = torch.amax if mechanism.facts.fades else torch.amin
        effects = {
            name: float(over_patches(_change(mechanism, given, moved)[seen])) for name, (moved, seen) in pairs.items()
        }
        name = min(effects, key=lambda name: effects[name])
        require(effects[name] > SEEN, f"the effect {name} is {effects[name]:.0e} at {sized(grid)}")
        least[sized(grid)] = effects[name]
    return "least effect " + ", ".join(f"{effect:.0e} at {size}" for size, effect in least.items())


def spatial_reduction(subject: AttentionSubject) -> str:
    """Checks that there may be fewer keys than queries, if the mechanism declares it."""
    mechanism = subject.build()
    if not reducible(mechanism):
        projected = f"it projects '{mechanism.host.project}'"
        raise not_supported("same_grid is True" if mechanism.facts.same_grid else projected)
    for grid in REDUCED:
        check_output(subject.build(grid), grid)
    return ", ".join(map(sized, REDUCED))


def position_bias(subject: AttentionSubject) -> str:
    """Checks that a bias on the logits changes the output and gets a gradient, if the mechanism accepts one."""
    mechanism = subject.build()
    if not mechanism.host.accepts_bias:
        if mechanism.takes("bias"):
            raise failed("forward takes bias, which no host hands to it while accepts_bias is False")
        raise not_supported("accepts_bias is False")
    given = inputs(mechanism, NOMINAL)
    bias = normal(1, mechanism.num_heads, NOMINAL.num_queries, NOMINAL.num_keys, seed=5).requires_grad_()
    out = given.replace(bias=bias)(mechanism)
    effect = relative_error(out, given(mechanism))
    (gradient,) = torch.autograd.grad(out, bias, normal(*out.shape, seed=6), allow_unused=True)
    arrives = gradient is not None and gradient.isfinite().all() and gradient.any()
    require(arrives, "no finite gradient reaches the bias")
    require(effect > SEEN, f"its effect is {effect:.0e}")
    return f"its effect is {effect:.0e}"


def masked_keys(subject: AttentionSubject) -> str:
    """Checks that masked keys and values have no influence and no gradient, if a mechanism can exclude keys."""
    mechanism = subject.build()
    if not mechanism.takes_mask:
        raise not_supported("mask_value is None, and accepts_bias is False")
    given = inputs(mechanism, NOMINAL)
    mask = torch.arange(NOMINAL.num_keys) < torch.tensor([[NOMINAL.num_keys - 70], [NOMINAL.num_keys]])
    hidden = ~mask[:, None, :, None]
    k, v = (torch.where(hidden, 64 * given[name], given[name]).requires_grad_() for name in "kv")
    extra = given.arguments[1]
    out = mechanism(given["q"], k, v, NOMINAL, mask=mask, **extra)
    change = relative_error(out, mechanism(given["q"], given["k"], given["v"], NOMINAL, mask=mask, **extra))
    judged(change, f"masked keys and values change the output by {change:.0e}")
    found = torch.autograd.grad(out, (k, v), normal(*out.shape, seed=6), allow_unused=True)
    for name, gradient in zip("kv", found, strict=True):
        if gradient is not None and (not gradient.isfinite().all() or gradient.masked_select(hidden).any()):
            raise failed(f"a gradient reaches the masked entries of {name}, or one that is not finite the others")
    if not mechanism.facts.equivariant:
        return f"they change the output by {change:.0e}"
    left = int(mask[0].sum())
    extra = {name: value[:1, :left] for name, value in extra.items()}
    alone = mechanism(given["q"][:1, :, :left], k[:1, :, :left], v[:1, :, :left], Grid((1, left)), **extra)
    error = relative_error(out[:1, :, :left], alone)
    return judged(error, f"the tokens that are left differ by {error:.0e} from those alone")


def attention_layer(subject: AttentionSubject) -> str:
    """Checks that `AttentionLayer` can use the mechanism, and that gradients reach all parameters of the layer."""
    if subject.hosted is None:
        raise not_supported("no package.module:Class leads to this class, so the layer cannot find it")
    layer = AttentionLayer(subject.dim, subject.num_heads, NOMINAL, attention=subject.hosted).double()
    x = normal(2, NOMINAL.num_queries, subject.dim, seed=5).requires_grad_()
    out = layer(x, NOMINAL)
    require(out.shape == x.shape, f"{tuple(x.shape)} in, {tuple(out.shape)} out")
    out.backward(normal(*out.shape, seed=6))
    tensors = {"the input": x, **{name: p for name, p in layer.named_parameters() if ".mechanism" not in f".{name}"}}
    without = [name for name, tensor in tensors.items() if tensor.grad is None or not tensor.grad.isfinite().all()]
    require(not without, f"no finite gradient reaches {', '.join(without)}")
    return f"{tuple(x.shape)}, projections '{layer.mechanism.host.project}', out_dim {layer.mechanism.out_dim}"


def _change(mechanism: Attention, given: Inputs, tokens: slice) -> Tensor:
    """Returns the relative change of each token's output, over the largest, when some tokens are replaced, (N,)."""

    def exchange(tensor: Tensor) -> Tensor:
        # Tokens are dimension 2 of (B, h, N, d) and dimension 1 of x (B, N, C).
        tensor = tensor.clone()
        view = tensor if tensor.ndim == 3 else tensor.transpose(1, 2)
        view[:, tokens] = normal(*view[:, tokens].shape, seed=7).to(tensor.dtype)
        return tensor

    before, after = given(mechanism), given.map(exchange)(mechanism)
    return (after - before).abs().amax((0, 1, 3)) / before.abs().max()
