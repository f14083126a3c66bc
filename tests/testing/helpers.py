"""Running single clauses of the contracts, reading a report, and making wrong subjects."""

from collections.abc import Callable
from typing import Any

from linvit import UserError
from linvit.testing import Line, Report, Verdict
from linvit.testing.attention import check as attention
from linvit.testing.attention.inputs import AttentionSubject
from linvit.testing.backbone import check as backbone
from linvit.testing.backbone.images import BackboneSubject
from linvit.testing.report import Contract


def changed(base: type, **members: Any) -> Any:
    """A subclass with other members, which `name_classes` names."""
    return type("", (base,), members)


def name_classes(module: dict[str, Any]) -> None:
    """Gives the classes of `changed` the names of their variables, `vars()` of a module, so that pickle finds them."""
    for name, found in module.items():
        if isinstance(found, type) and not found.__name__:
            found.__name__ = found.__qualname__ = name
            found.__module__ = module["__name__"]


def refuse(words: str) -> Any:
    raise UserError(words)


def assert_fail(lines: list[Line], words: str) -> None:
    """All lines are failures, and the first says these words."""
    assert all(line.verdict is Verdict.FAIL for line in lines), lines
    assert words in lines[0].note


def verdicts(report: Report, verdict: Verdict) -> set[str]:
    return {line.name for line in report.lines if line.verdict is verdict}


def attention_lines(spec: Any, names: set[str]) -> list[Line]:
    """The named clauses of a mechanism, and no other, in the order of the contract."""
    return _lines(attention.CONTRACT, AttentionSubject(spec, 32, 2, quick=True), names)


def backbone_lines(spec: Any, names: set[str], img_size: int = 32) -> list[Line]:
    """The named clauses of a backbone, and no other, in the order of the contract."""
    return _lines(backbone.CONTRACT, BackboneSubject(spec, None, img_size, quick=True), names)


def clauses(contract: Contract, keep: Callable[[Any], bool] = lambda check: check.quick) -> list[str]:
    """Names of the clauses of a quick run, or of others."""
    return [check.name for check in (*contract.first, *contract.clauses) if keep(check)]


def _lines(contract: Contract, subject: Any, names: set[str]) -> list[Line]:
    chosen = [check for check in (*contract.first, *contract.clauses) if check.name in names]
    assert {check.name for check in chosen} == names
    return [check.line(subject) for check in chosen]
