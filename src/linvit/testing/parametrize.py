"""Makes each clause of a contract a pytest case, for any test suite."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from linvit.attention.base import Attention
from linvit.errors import UserError, check_choice
from linvit.registry import Spec
from linvit.testing.attention import check as attention
from linvit.testing.attention.inputs import AttentionSubject
from linvit.testing.backbone import check as backbone
from linvit.testing.backbone.images import BackboneSubject
from linvit.testing.report import Check, Contract, Line, Verdict
from linvit.testing.subject import Subject

KINDS: dict[str, tuple[Contract, Callable[..., Subject], dict[str, Any]]] = {  # with the options and defaults
    "attention": (attention.CONTRACT, AttentionSubject, {"dim": 32, "num_heads": 2}),
    "backbone": (backbone.CONTRACT, BackboneSubject, {"attention": None, "img_size": 64}),
}


def parametrize_with_checks(
    specs: Sequence[Spec | type[Attention] | Callable[..., nn.Module]],
    *,
    kind: Literal["attention", "backbone"] = "attention",
    quick: bool = False,
    **options: Any,
) -> Callable[[Callable[..., None]], Any]:
    """Returns a pytest decorator that gives a test function one case per spec and clause of the contract.

    The function takes one argument, `check`, and calls it: a broken clause is an `AssertionError` with the numbers, and
    one that the subject does not declare or support is skipped with the reason.

    Args:
        specs: Specs for `check_attention` or `check_backbone`: names, `{name: ..., option: value}`,
            "package.module:Class", classes, or functions that build a backbone. Nothing is imported or built before the
            first case of a spec runs.
        kind: Contract to check: "attention" or "backbone".
        quick: Skip the largest sizes and, for backbones, `torch.compile`, `torch.export` and ONNX.
        options: Options of the checks: `dim` and `num_heads` of attentions, `attention` and `img_size` of backbones.

    Raises:
        UserError: If `kind` or an option is unknown, or `specs` is not a list.

    Example:
        >>> from linvit.testing import parametrize_with_checks
        >>> @parametrize_with_checks(["focused", {"name": "focused", "focusing_factor": 4}], quick=True)
        ... def test_attention(check):
        ...     check()
    """
    import pytest

    check_choice("kind", kind, list(KINDS))
    if isinstance(specs, str | Mapping) or not isinstance(specs, Sequence):
        raise UserError(f"specs must be a list of names, specs or classes; got {specs!r}. Write [{specs!r}]")
    contract, subject, defaults = KINDS[kind]
    for option in options:
        check_choice(f"the options of kind={kind!r}", option, list(defaults))
    cases: list[tuple[str, Callable[[], None]]] = []
    for spec in specs:
        made = functools.cache(functools.partial(subject, spec, **(defaults | options), quick=quick))
        obstacle = functools.cache(lambda made=made: contract.obstacle(made()))
        for check in (*contract.first, *contract.of(quick)):
            before = None if check in contract.first else obstacle
            cases.append((_case_name(spec, check.name), functools.partial(_judge, check, made, before)))
    return pytest.mark.parametrize("check", [case for _, case in cases], ids=[name for name, _ in cases])


def _judge(check: Check, subject: Callable[[], Subject], obstacle: Callable[[], Line | None] | None) -> None:
    """Raises an `AssertionError` if the subject breaks a clause; skips a clause that does not apply."""
    import pytest

    if obstacle is not None and (other := obstacle()) is not None:
        pytest.skip(f"fix '{other.name}' first: {other.note}")
    found = check.line(subject(), first=obstacle is None)
    if found.verdict is Verdict.FAIL:
        raise AssertionError(f"{found.name}: {found.note}") from found.error
    if found.verdict is not Verdict.PASS:
        pytest.skip(f"{found.verdict.value}: {found.note}")


def _case_name(spec: Any, clause: str) -> str:
    """Returns a name such as "focused-shape-and-dtype", without importing anything."""
    name = spec if isinstance(spec, str) else getattr(spec, "__qualname__", spec)
    if isinstance(spec, Mapping):
        parts = (str(value) if key == "name" else f"{key}={value}" for key, value in spec.items())
        name = ",".join(parts).replace(" ", "")
    return f"{name}-{re.sub('[ ,]+', '-', clause)}"
