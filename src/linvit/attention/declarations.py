"""What an attention mechanism declares: what its host does for it (`Host`), and what is known of it (`Facts`)."""

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
    """What the layer around a mechanism does for it.

    Attributes:
        project: What it projects its input to. "qkv"; "qv": k is q (SOFT); "kv": q is the input itself (Poly-NL);
            "qk": v is (MLLA).
        bias: Whether these projections have a bias where the layer's option `qkv_bias` asks for one. The gate's does
            not depend on it.
        stem: What it does to its input first: "conv_silu", a linear layer, a depthwise 3 x 3 convolution and SiLU.
        norm: Norm of the output: "ln", a LayerNorm over all channels before the gate (NaLaFormer); "bn2d", a BatchNorm
            over all tokens behind the output projection, in place of its bias (EfficientViT).
        gate: What it multiplies the output by, entry by entry, before its output projection: "linear", a linear map of
            its input, without the stem (RALA, PolaFormer); "silu", SiLU of that (MLLA, NaLaFormer).
        input: Whether it hands `forward` its input (B, N, C) as `x`.
        accepts_bias: Whether it may hand `forward` a `bias` (B or 1, h, N, M), to be added to the logits.
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
    """What hosts, analysis and `linvit check` may rely on.

    Attributes:
        complexity: How time and memory grow with the number of tokens N; None if undeclared.
        same_grid: Whether keys and values must be of the queries' grid: no spatial reduction.
        same_width: Whether keys must be as wide as values, as where both are multiplied entry by entry: no `key_dim`.
        equivariant: Whether the output moves with its queries and keys are a set: no token's place in the grid counts.
            Hosts that drop tokens ask it.
        rotary: Whether the mechanism turns q and k, or features of them, by their positions. A host that does refuses
            it then.
        mask_value: What the entries of a key that a mask leaves out are set to, at which it has no weight, whatever
            the others are; None where no number does that. What accepts a bias or a `mask` needs none.
        channelwise: Whether the equivalent matrix differs from channel to channel.
        linear_in_values: Whether the output is `M v + bias` with M independent of v. If not, the mechanism has its own
            `attention_matrix(q, k, v, grid)`.
        matrix_is_exact: Whether that method's matrix times v is the output. Not where more is done to the values before
            or to their mixture after (a norm, a linear layer).
        no_matrix: Why there is no such matrix at all, for a mechanism whose weights depend on the values.
        max_rank: An upper bound of the matrix's rank (of each channel's, if channelwise) on any grid; None is none.
        state_size: Numbers per image that all keys and values come down to, where no `factors` tell it.
    """

    complexity: Complexity | None = None
    same_grid: bool = False
    same_width: bool = False
    equivariant: bool = False
    rotary: bool = False
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
    """Returns both with some fields replaced; no field of one is of the other."""
    of_host = {name: value for name, value in given.items() if hasattr(host, name)}
    of_facts = {name: value for name, value in given.items() if name not in of_host}
    return replace(host, **of_host), replace(facts, **of_facts)


SAME = (
    "stem gate complexity equivariant rotary channelwise linear_in_values matrix_is_exact no_matrix max_rank state_size"
)
BEFORE = {name: name for name in SAME.split()} | {
    **{"projections": "project", "out_norm": "norm", "proj_norm": "norm", "qkv_bias": "bias", "takes_input": "input"},
    **{
        "takes_bias": "accepts_bias",
        "masked_key": "mask_value",
        "fewer_keys": "same_grid",
        "narrow_keys": "same_width",
    },
}
"""What linvit 0.2 had as attributes of a mechanism. This, and what reads it, goes with linvit 0.4."""


def declared_before(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Host` and `Facts` that attributes of linvit 0.2 stand for, with a `DeprecationWarning`.

    Other attributes of such names, as a module `gate`, are none of these.
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
            stacklevel=4,
        )
    return new
