"""The cost that each mechanism's file states, `FORMULA` MACs, is evaluated and held to the operations that run."""

import inspect
import re
from typing import Any

import pytest

from linvit import Grid, UserError
from linvit.analysis import attention_cost
from linvit.analysis.operations import Operations
from linvit.registry import attentions
from tests.helpers import own_names

DIM, HEADS = 96, 3
GRID = Grid((12, 14), num_prefix=1)
WORDS = {"MACs": "matmul", "elementwise operations": "elementwise"}
CASES: list[tuple[str, dict[str, Any], dict[str, int]]] = [  # options, and the symbols that they set in the formula
    ("softmax", {}, {}),
    ("softmax", {"fused": False, "qk_norm": True}, {}),
    ("linear", {}, {}),
    ("focused", {}, {"k": 5}),
    ("focused", {"dwc_kernel": 3, "norm_scope": "per_head", "stable_power": False, "denominator": "sum"}, {"k": 3}),
    ("slab", {}, {"k": 5}),
    ("hydra", {"kernel_q": "identity", "kernel_k": "identity"}, {}),
    ("efficient", {}, {}),
    ("enhanced_linear", {}, {"S": 1, "s": 5}),
    ("enhanced_linear", {"scales": [3, 3]}, {"S": 2, "s": 3}),
    (
        "enhanced_linear",
        {"scales": [], "head_dim": 20, "heads_ratio": 1.5},
        {"S": 0, "s": 0, "C": 120, "h": 6, "d": 20},
    ),
    ("taylor", {}, {}),
    ("linear_angular", {}, {"r": 9}),
    ("linear_angular", {"res_kernel_size": 5, "half": "mean", "sparse_reg": True}, {"r": 5}),
    ("performer", {"nb_features": 40}, {"m": 40}),
    ("performer", {"kernel": "relu", "nb_features": 24}, {"m": 24}),
    ("linformer", {"k": 9}, {"k": 9}),
    ("linformer", {"k": 20, "share": "none"}, {"k": 20}),
    ("nystrom", {"num_landmarks": 9, "conv_kernel": 5}, {"m": 9, "T": 6, "s": 5}),
    ("nystrom", {"num_landmarks": 20, "pinv_iters": 2}, {"m": 20, "T": 2, "s": 0}),
    ("aft_simple", {}, {}),
    ("poly_nl", {}, {}),
    ("agent", {}, {"n": 49, "k": 3, "s": 7}),
    ("agent", {"agents": 9, "bias_size": 5, "dwc_kernel": 0}, {"n": 9, "k": 0, "s": 5}),
    ("rala", {}, {"k": 5}),
    ("rala", {"rotary": False, "lepe_kernel": 3}, {"k": 3}),
    ("flow", {}, {}),
    ("separable", {}, {}),
    ("additive", {}, {}),
    ("inline", {}, {"k": 3}),
    ("inline", {"residual_kernel": 5, "feature_map": "relu"}, {"k": 5}),
    ("mala", {}, {"k": 5}),
    ("mlla", {}, {"k": 3}),
    ("pola_pp", {}, {"k": 5}),
    ("nala", {}, {"k": 5}),
    ("xca", {}, {}),
    ("vssd", {}, {"e": 1, "g": 3}),
    ("vssd", {"expand": 2, "groups": 1}, {"e": 2, "g": 1}),
    ("vittt", {}, {}),
    ("t5", {}, {"k": 3}),
    ("t5", {"conv": 0}, {"k": 0}),
    ("mhla", {"blocks": 2}, {"T": 5, "s": 5}),
    ("mhla", {"blocks": 1, "lepe_kernel": 0}, {"T": 2, "s": 0}),
    ("pola", {}, {"k": 5}),
    ("pola", {"dwc": False}, {"k": 0}),
    ("hedgehog", {"feature_dim": 32}, {"f": 32}),
    ("hedgehog", {"feature_dim": 12, "tied": True}, {"f": 12}),
    ("cosformer", {}, {}),
    ("taylor_shift", {"form": "efficient"}, {}),
    ("circulant", {}, {"T": 8, "F": 96}),
    ("monarch", {}, {"S": 182, "b": 14, "B": 13, "T": 2}),
    ("monarch", {"block": 10, "steps": 3}, {"S": 170, "b": 10, "B": 17, "T": 3}),
    ("lara", {}, {"m": 49}),
    ("window", {"window_size": 2}, {"w": 2, "p": 1}),
    ("sla", {"window_size": 2}, {"w": 2, "p": 1}),
    ("lolcats", {"window_size": 2, "feature_dim": 12}, {"w": 2, "p": 1, "f": 12}),
    ("jetvit", {}, {"k": 3, "r": 4}),
    ("gdla", {}, {}),
    ("lion", {}, {"S": 192, "T": 64, "o": 2, "g": 0}),
    ("lion", {"order": "normal", "decay": "selective"}, {"S": 192, "T": 64, "o": 1, "g": 1}),
    ("delta", {}, {"S": 192, "T": 64, "o": 2, "g": 1}),
    ("gated_delta", {"directions": 4}, {"S": 192, "T": 64, "o": 4, "g": 2}),
    ("soft", {"ratio": 4}, {"R": 4, "m": 9, "T": 20, "s": 5}),
    ("soft", {"ratio": 2, "newton_iters": 3, "conv_size": 0}, {"R": 2, "m": 42, "T": 3, "s": 0}),
    ("soft_norm", {"ratio": 4}, {"R": 4, "m": 9, "T": 20, "s": 5}),
    ("soft_norm", {"ratio": 2, "newton_iters": 3, "conv_size": 0}, {"R": 2, "m": 42, "T": 3, "s": 0}),
]


def formulas(name: str) -> dict[str, str]:
    """What the file of a mechanism says after "Cost:", by the field of `Operations`; formulas as Python."""
    text = inspect.getmodule(attentions.get(name)).__doc__
    cost = re.search(r"^Cost: (.*?)\bRank:", text, re.MULTILINE | re.DOTALL)[1].replace("\n", " ")
    found = re.findall(rf"`([^`]+)` ({'|'.join(WORDS)})", cost)
    return {WORDS[word]: python(formula) for formula, word in found}


def python(formula: str) -> str:
    """`(N + M) C d^2` as `(N+M)*C*d**2`: what stands side by side is multiplied."""
    tokens = re.findall(r"[A-Za-z]+|\d+|\S", formula)
    pairs = zip(tokens, [*tokens[1:], ""], strict=True)
    product = "".join(
        f"{token}*" if re.match(r"[\w)]", token) and re.match(r"[\w(]", after) else token for token, after in pairs
    )
    return product.replace("^", "**")


def assert_stated(name: str, options: dict[str, Any], symbols: dict[str, int], grid: Grid, key_dim: int | None) -> None:
    if "operations without prefix tokens" in inspect.getmodule(attentions.get(name)).__doc__:
        grid = grid._replace(num_prefix=0)
    try:
        counted: Operations = attention_cost({"name": name, **options}, grid, dim=DIM, num_heads=HEADS, key_dim=key_dim)
    except UserError:
        assert grid.kv_size is not None  # only fewer keys than queries may be refused
        return
    width = symbols.get("d", DIM // HEADS)
    sizes = {"N": grid.num_queries, "M": grid.num_keys, "P": grid.num_queries - grid.num_prefix}
    sizes["Q"] = grid.num_keys - grid.num_prefix
    sizes |= {"C": DIM, "h": HEADS, "d": width, "dk": key_dim or width} | symbols
    for field, formula in formulas(name).items():
        assert eval(formula, {"__builtins__": {}}, sizes) == getattr(counted, field), (field, formula)


@pytest.mark.parametrize(("name", "options", "symbols"), CASES, ids=str)
def test_stated_cost_is_what_runs(name: str, options: dict[str, Any], symbols: dict[str, int]) -> None:
    """With as many keys as queries and with fewer, of the width of the values and narrower."""
    for grid in (GRID, GRID._replace(kv_size=(6, 7))):
        for key_dim in [None, 20] if not attentions.get(name).facts.same_width else [None]:
            assert_stated(name, options, symbols, grid, key_dim)


def test_every_file_of_ours_states_its_cost() -> None:
    ours = set(own_names(attentions))
    assert {name for name, *_ in CASES} == ours
    assert all(formulas(name) for name in ours)


def test_a_wrong_formula_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = inspect.getmodule(attentions.get("linear"))
    monkeypatch.setattr(module, "__doc__", module.__doc__.replace("(N + M) C dk", "(N + M) C d"))
    assert_stated("linear", {}, {}, GRID, None)  # the same with wide keys
    with pytest.raises(AssertionError, match="matmul"):
        assert_stated("linear", {}, {}, GRID, 20)
