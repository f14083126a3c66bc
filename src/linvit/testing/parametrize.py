"""Makes each clause of a contract a test case of pytest, for any test suite."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from torch import nn

from linvit.attention.base import Attention
from linvit.errors import UserError, check_choice
from linvit.registry import Spec
from linvit.testing.attention import check as attention_check
from linvit.testing.attention.inputs import Subject as AttentionSubject
from linvit.testing.backbone import check as backbone_check
from linvit.testing.backbone.images import Subject as BackboneSubject
from linvit.testing.head import check as head_check
from linvit.testing.head.network import HeadSubject
from linvit.testing.report import Line, Verdict
from linvit.testing.runner import Check, Contract, line

S = TypeVar("S")


def parametrize_with_checks(
    specs: Sequence[Spec | type[Attention] | Callable[..., nn.Module]],
    *,
    kind: Literal["attention", "backbone", "head", "detection_head"] = "attention",
    quick: bool = False,
    **options: Any,
) -> Callable[[Callable[..., None]], Any]:
    """A pytest decorator that gives a test function one case per spec and clause of the contract.

    The function takes one argument, `check`, and calls it: a broken clause is an `AssertionError` with the numbers, and
    one that the subject does not declare or support is skipped with the reason. Each spec is built once. The growth of
    time is left out, since it is only measured.

    Args:
        specs: What `check_attention`, `check_backbone` or `check_head` takes: names, `{name: ..., option: value}`,
            "package.module:Class", classes, or functions that build a backbone. Nothing is imported or built before the
            first case of a spec runs.
        kind: Which contract: "attention", "backbone", "head" (of semantic segmentation) or "detection_head".
        quick: Leave out `torch.compile`, `torch.export` and the largest sizes.
        options: Of the checks: `dim` and `num_heads` of attentions, `attention` and `img_size` of backbones,
            `img_size` of heads.

    Raises:
        UserError: If `kind` is another, or `specs` is no list.

    Example:
        >>> from linvit.testing import parametrize_with_checks
        >>> @parametrize_with_checks(["focused", {"name": "focused", "focusing_factor": 4}], quick=True)
        ... def test_attention(check):
        ...     check()
    """
    import pytest

    check_choice("kind", kind, ["attention", "backbone", "head", "detection_head"])
    if isinstance(specs, str | Mapping) or not isinstance(specs, Sequence):
        raise UserError(f"specs must be a list of names, specs or classes; got {specs!r}. Write [{specs!r}]")
    cases: list[Case[Any]] = []
    for spec in specs:
        if kind == "attention":
            cases += _cases(attention_check.CONTRACT, _attention(spec, quick, **options), spec, quick)
        elif kind in ("head", "detection_head"):
            contract = head_check.CONTRACT if kind == "head" else head_check.DETECTION
            cases += _cases(contract, _head(spec, quick, **options), spec, quick)
        else:
            cases += _cases(backbone_check.CONTRACT, _backbone(spec, quick, **options), spec, quick)
    return pytest.mark.parametrize("check", cases, ids=[case.name for case in cases])


class Case(Generic[S]):
    """Tests one clause on one mechanism or backbone when it is called.

    Attributes:
        name: Subject and clause, as "focused-gradients".
    """

    def __init__(
        self, name: str, check: Check[S], subject: Callable[[], S], obstacle: Callable[[], Line | None] | None
    ) -> None:
        self.name = name
        self._check = check
        self._subject = subject
        self._obstacle = obstacle

    def __call__(self) -> None:
        """Runs the clause.

        Raises:
            AssertionError: If the subject breaks it.
            UserError: If there is no such subject, or it refuses its options.
        """
        import pytest

        obstacle = None if self._obstacle is None else self._obstacle()
        if obstacle is not None:
            pytest.skip(f"fix '{obstacle.name}' first: {obstacle.note}")
        found = line(self._check, self._subject(), first=self._obstacle is None)
        if found.verdict is Verdict.FAIL:
            raise AssertionError(f"{found.name}: {found.note}") from found.error
        if found.verdict is not Verdict.PASS:
            pytest.skip(f"{found.verdict.value}: {found.note}")

    def __repr__(self) -> str:
        return self.name


def _cases(contract: Contract[S], make: Callable[[], S], spec: Any, quick: bool) -> list[Case[S]]:
    subject = functools.cache(make)

    @functools.cache
    def obstacle() -> Line | None:
        """Returns the line of the constructor or the declarations that failed, if one did."""
        lines = (line(check, subject(), first=True) for check in contract.first)
        return next((found for found in lines if found.verdict is Verdict.FAIL), None)

    cases = [Case(_case_name(spec, check), check, subject, None) for check in contract.first]
    return cases + [
        Case(_case_name(spec, check), check, subject, obstacle)
        for check in contract.clauses
        if not check.measures and (check.quick or not quick)
    ]


def _attention(spec: Any, quick: bool, *, dim: int = 32, num_heads: int = 2) -> Callable[[], AttentionSubject]:
    return functools.partial(AttentionSubject, spec, dim, num_heads, quick)


def _backbone(
    spec: Any, quick: bool, *, attention: Any = None, img_size: int | Sequence[int] = 64
) -> Callable[[], BackboneSubject]:
    return functools.partial(BackboneSubject, spec, attention, img_size, quick)


def _head(spec: Any, quick: bool, *, img_size: int | Sequence[int] = 64) -> Callable[[], HeadSubject]:
    return functools.partial(HeadSubject, spec, img_size, quick)


def _case_name(spec: Any, check: Check[S]) -> str:
    """Returns a name such as "focused-shape-and-dtype"; nothing is imported for it."""
    name = spec if isinstance(spec, str) else getattr(spec, "__qualname__", None)
    if isinstance(spec, Mapping):
        name = ",".join(
            str(value) if key == "name" else f"{key}={value}".replace(" ", "") for key, value in spec.items()
        )
    return f"{name or spec}-{re.sub('[ ,]+', '-', check.name)}"
