"""Options that are numbers: what no option takes, and what lies beyond the bounds of each, is refused by name."""

import inspect
import math
import re
from typing import Any

import pytest

import linvit
from linvit import Grid, UserError
from linvit.registry import attentions
from linvit.registry.signatures import choices, parameters_of, signature
from tests.helpers import own_names

NO_NUMBERS = [True, "3", math.nan, math.inf, -math.inf, [1]]

SHARED_BY_SOFT = {
    "ratio": [0, 2.5],
    "newton_iters": [0, 2.5],
    "newton_alpha": [0, 2.1],
    "newton_beta": [0, 1],
    "max_backtrack": [-1, 2.5],
    "backtrack_tol": [0.9],
    "ridge": [-0.1],
    "conv_size": [-1, 2, 2.5],
}

SHARED_BY_ROTARY = {"lepe_kernel": [-1, 2, 2.5], "eps": [-1e-6]}

OF_FOCUSED = {"focusing_factor": [0.5], "dwc_kernel": [-1, 0, 2, 2.5], "relu_eps": [-1e-6], "eps": [-1e-6]}

BEYOND: dict[str, dict[str, list[float]]] = {
    "softmax": {"qk_scale": [0], "attn_drop": [-0.1, 1.1], "lepe_kernel": [-1, 2, 2.5]},
    "linear": {"eps": [-1e-6], "relu_eps": [-1e-6]},
    "focused": OF_FOCUSED,
    "slab": OF_FOCUSED,
    "hydra": {"eps": [-1e-6], "constant": [0, -2]},
    "efficient": {"key_ratio": [0, -1]},
    "enhanced_linear": {"head_dim": [0, 2.5], "heads_ratio": [0, -1], "eps": [0, 1e-60]},
    "taylor": {"eps": [-1e-6], "norm_eps": [-1e-6], "key_reduction": [0, 2.5]},
    "linformer": {"k": [0, 2.5], "attn_drop": [-0.1, 1.1]},
    "linear_angular": {"res_kernel_size": [-1, 0, 2, 2.5], "sparse_threshold": [-0.1, 1], "eps": [-1e-6]},
    "performer": {
        "nb_features": [0, 2.5],
        "kernel_eps": [-1e-6],
        "ortho_scaling": [-1, 0.5, 2],
        "redraw_interval": [0, 2.5],
        "seed": [-1, 2.5, 2**63],
    },
    "nystrom": {"num_landmarks": [0, 2.5], "pinv_iters": [-1, 2.5], "conv_kernel": [-1, 2, 2.5]},
    "agent": {"agents": [0, 2.5], "bias_size": [0, 2.5], "pool_size": [0, 2.5], "dwc_kernel": [-1, 2, 2.5]},
    "rala": SHARED_BY_ROTARY,
    "pola": {"alpha": [-1], "dwc_kernel": [-1, 0, 2, 2.5], "eps": [-1e-6]},
    "mhla": {"blocks": [0, 2.5], "lepe_kernel": [-1, 2, 2.5], "eps": [-1e-6]},
    "window": {"window_size": [0, 2.5]},
    "sla": {"window_size": [0, 2.5], "init_alpha": [], "topk": [0, 1.5]},
    "lolcats": {"window_size": [0, 2.5], "feature_dim": [0, 2.5]},
    "jetvit": {"kernel_size": [0, 2, 2.5], "reduction": [0, 2.5]},
    "xca": {"temperature": [0, -1]},
    "flow": {"eps": [-1e-6], "eps_out": [-1e-6]},
    "inline": {"residual_kernel": [-1, 2, 2.5]},
    "mala": SHARED_BY_ROTARY,
    "mlla": SHARED_BY_ROTARY,
    "pola_pp": SHARED_BY_ROTARY,
    "nala": {**SHARED_BY_ROTARY, "power": [1.5], "key_power": [0.5]},
    "vssd": {"expand": [0, 1.5], "d_state": [0, 1.5], "groups": [0, 1.5]},
    "vittt": {"inner_lr": [0, -1]},
    "t5": {"conv": [-1, 2, 2.5], "inner_lr": [0, -1]},
    "hedgehog": {"feature_dim": [0, 2.5]},
    "cosformer": {"eps": [0]},
    "taylor_shift": {"a": [0], "b": [], "c": [0]},
    "monarch": {"block": [0, 2.5], "steps": [0, 2.5]},
    "lara": {"landmarks": [0, 2.5], "alpha": [-1]},
    "soft": SHARED_BY_SOFT,
    "soft_norm": SHARED_BY_SOFT,
}
"""By mechanism and option, numbers that are too small, too large, even where a kernel has a centre, or not whole."""


def numbers(name: str) -> set[str]:
    """The options of a mechanism whose type is a number, or a number or None."""
    classes = [owner for owner in attentions.get(name).__mro__ if issubclass(owner, linvit.Attention)]  # with **options
    parameters = (p for owner in classes for p in inspect.signature(owner).parameters.values())
    taken = parameters_of(attentions.get(name)).keys() - {"key_dim"}
    options = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in taken]
    return {p.name for p in options if p.annotation in (int, float, int | None, float | None)}


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in BEYOND for option in BEYOND[name]])
def test_what_is_no_number_or_out_of_bounds_is_refused(name: str, option: str) -> None:
    for value in [*NO_NUMBERS, *BEYOND[name][option]]:
        spec: dict[str, Any] = {"name": name, option: value}
        with pytest.raises(UserError, match=f"^{option} must be .*; got {re.escape(repr(value))}$"):
            linvit.create_attention(spec, dim=24, num_heads=3, grid=Grid((4, 4)))


@pytest.mark.parametrize("name", own_names(attentions))
def test_no_number_is_left_out(name: str) -> None:
    assert numbers(name) <= set(BEYOND.get(name, {}))


WORDS = [
    (name, option, allowed)
    for name in own_names(attentions)
    for option, parameter in signature(attentions.get(name))[0].items()
    if (allowed := choices(parameter))
]


@pytest.mark.parametrize(("name", "option", "allowed"), WORDS, ids=[f"{name}-{option}" for name, option, _ in WORDS])
def test_another_word_than_the_annotation_lists_is_refused(name: str, option: str, allowed: tuple[str, ...]) -> None:
    given = f"{allowed[-1]}x"
    message = f"{option} must be one of {', '.join(allowed)}; got '{given}'. Did you mean '{allowed[-1]}'?"
    with pytest.raises(UserError, match=re.escape(message)):
        linvit.create_attention({"name": name, option: given}, dim=24, num_heads=3, grid=Grid((4, 4)))
