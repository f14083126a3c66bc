"""Declarations of an attention mechanism: tasks of the layer around it (`Host`) and properties (`Facts`)."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from linvit.errors import UserError, check_choice, check_number

Project = Literal["qkv", "qv", "kv", "qk"]
Stem = Literal["none", "conv_silu"]
Norm = Literal["none", "ln", "bn2d"]
OutNorm = Literal["none", "ln"]
Gate = Literal["none", "linear", "silu"]
Precision = Literal["float32", "mixed", "inherit"]
Complexity = Literal["O(N)", "O(N log N)", "O(N^1.5)", "O(N^2)"]


def _check(declared: "Host | Facts") -> None:
    for field in fields(declared):
        value = getattr(declared, field.name)
        allowed = get_args(Complexity) if field.name == "complexity" and value is not None else get_args(field.type)
        if field.type is bool and not isinstance(value, bool):
            raise UserError(f"{field.name} must be True or False; got {value!r}")
        if allowed and all(isinstance(choice, str) for choice in allowed):
            check_choice(field.name, value, allowed)


@dataclass(frozen=True)
class Host:
    """Tasks of the layer around a mechanism, its host.

    Attributes:
        project: Projections of the layer's input. "qkv"; "qv": k is q (SOFT); "kv": q is the input itself (Poly-NL);
            "qk": v is the input itself (MLLA).
        bias: True if these projections have a bias where the layer's option `qkv_bias` asks for one. The bias of the
            gate does not depend on it.
        stem: Layers before the projections: "conv_silu", a linear layer, a depthwise 3 x 3 convolution and SiLU.
        norm: Norm of the output: "ln", a LayerNorm over all channels before the gate (NaLaFormer); "bn2d", a BatchNorm
            over all tokens after the output projection, in place of its bias (EfficientViT).
        gate: Factor of the output, entry by entry, before the output projection: "linear", a linear map of the layer's
            input, without the stem (RALA, PolaFormer); "silu", SiLU of that (MLLA, NaLaFormer).
        input: True if the layer passes its input (B, N, C) to `forward` as `x`.
        accepts_bias: True if the layer may pass a `bias` (B or 1, h, N, M) to `forward`, to be added to the logits.
    """

    project: Project = "qkv"
    bias: bool = True
    stem: Stem = "none"
    norm: Norm = "none"
    gate: Gate = "none"
    input: bool = False
    accepts_bias: bool = False

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Facts:
    """Properties of a mechanism that hosts, analysis and `linvit check` rely on.

    Attributes:
        complexity: Growth of time and memory with the number of tokens N; None if undeclared.
        same_grid: True if keys and values must be of the queries' grid: no spatial reduction.
        same_width: True if keys must be as wide as values, such as where both are multiplied entry by entry: no
            `key_dim`.
        equivariant: True if tokens in another order give the same outputs in that order, so that positions have no
            effect. Hosts that drop tokens need it.
        rotary: True if the mechanism rotates q and k, or features of them, by their positions. Hosts that do so
            themselves then refuse it.
        fades: True if the weight of a key falls with its distance without a limit, so that far tokens have no effect.
        packs: True if `forward` takes rows (1, h, T, d) of images of several sizes, with a `Packed` in place of a
            grid. If not, it is called with each group of images of one size: the same result, with more calls. A
            subclass does not inherit it; it declares it in its own `facts`.
        mask_value: Number that the entries of a masked key are set to, so that the key has no weight, whatever the
            other keys are; None if there is no such number. A mechanism that accepts a bias or a `mask` needs none.
        channelwise: True if the equivalent matrix differs from channel to channel.
        linear_in_values: True if the output is `M v + bias` with M independent of v. If not, the mechanism has its own
            `attention_matrix(q, k, v, grid)`.
        matrix_is_exact: True if that method's matrix times v is the output. False where the values are changed before,
            or their mixture after (a norm, a linear layer).
        no_matrix: Reason why no such matrix exists, for a mechanism whose weights depend on the values.
        max_rank: Upper bound of the matrix's rank (of each channel's, if channelwise) on any grid; None if there is
            none. Of a mechanism that adds a convolution of the values, it is that of `core` alone.
        state_size: Numbers per image that summarise all keys and values, if `factors` do not determine it.
    """

    complexity: Complexity | None = None
    same_grid: bool = False
    same_width: bool = False
    equivariant: bool = False
    rotary: bool = False
    fades: bool = False
    packs: bool = False
    mask_value: float | None = None
    channelwise: bool = False
    linear_in_values: bool = True
    matrix_is_exact: bool = True
    no_matrix: str = ""
    max_rank: int | None = None
    state_size: int | None = None

    def __post_init__(self) -> None:
        _check(self)
        for name in ("max_rank", "state_size"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), at_least=1, whole=True)
        if self.no_matrix and self.linear_in_values:
            raise UserError(f"no_matrix says '{self.no_matrix}', so linear_in_values must be False; got True")


def declared(host: Host, facts: Facts, given: Mapping[str, Any]) -> tuple[Host, Facts]:
    """Returns both with some fields replaced; they have no field in common."""
    known = {field.name: table for table in (host, facts) for field in fields(table)}
    for name in given:
        check_choice("a declared field", name, known)
    of_host, of_facts = (
        {name: value for name, value in given.items() if known[name] is table} for table in (host, facts)
    )
    return replace(host, **of_host), replace(facts, **of_facts)


SAME = (
    "stem gate complexity equivariant rotary channelwise linear_in_values matrix_is_exact no_matrix max_rank state_size"
)
BEFORE = {name: name for name in SAME.split()} | {
    "projections": "project",
    "qkv_bias": "bias",
    "out_norm": "norm",
    "proj_norm": "norm",
    "takes_input": "input",
    "takes_bias": "accepts_bias",
    "masked_key": "mask_value",
    "fewer_keys": "same_grid",
    "narrow_keys": "same_width",
}
"""Fields by the names of attributes that a mechanism had in linvit 0.2. linvit 0.4 removes this and its uses."""


def declared_before(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Host` and `Facts` for attributes of linvit 0.2, with a `DeprecationWarning`.

    Other attributes of such names, such as a module `gate`, are ignored.
    """
    old = {
        name: value for name, value in given.items() if name in BEFORE and isinstance(value, str | bool | float | int)
    }
    new = {
        BEFORE[name]: not value if name in ("fewer_keys", "narrow_keys") else value
        for name, value in old.items()
        if (name, value) not in (("out_norm", "none"), ("proj_norm", "none"))
    }
    if old:
        names = {field.name for field in fields(Host)}
        forms = [
            f"{kind} = linvit.{kind.title()}({', '.join(f'{n}={v!r}' for n, v in new.items() if (n in names) == host)})"
            for kind, host in (("host", True), ("facts", False))
            if any((n in names) == host for n in new)
        ]
        warnings.warn(
            f"{owner} declares {', '.join(old)} as linvit 0.2 had it, which linvit 0.4 does not read. Write "
            f"{' and '.join(forms)} in the class, or self.declare(name=value) in its constructor",
            DeprecationWarning,
            stacklevel=3,
        )
    return new
