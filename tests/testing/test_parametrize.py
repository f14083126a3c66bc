"""`parametrize_with_checks`: one case of pytest per spec and clause."""

import ast
from pathlib import Path
from typing import Any

import pytest

import linvit.testing
from linvit.testing import parametrize_with_checks
from linvit.testing.attention.check import CONTRACT
from linvit.testing.backbone.check import CONTRACT as BACKBONE
from tests.testing import wrong, wrong_backbones
from tests.testing.helpers import clauses

LINEAR = {"name": "linear", "feature_map": "relu"}


def cases(*args: object, **options: object) -> dict[str, Any]:
    def test(check: object) -> None: ...

    (mark,) = parametrize_with_checks(*args, **options)(test).pytestmark
    names, values = mark.args
    assert names == "check"
    return dict(zip(mark.kwargs["ids"], values, strict=True))


def test_one_case_per_spec_and_clause_that_can_fail() -> None:
    found = cases(["focused", LINEAR, wrong.Sound, "tests.testing.wrong:Sound"], quick=True)
    judged = clauses(CONTRACT)
    assert len(found) == 4 * len(judged)
    assert {"focused-gradients", "linear,feature_map=relu-shape-and-dtype", "Sound-numerics-float16"} <= found.keys()
    assert "tests.testing.wrong:Sound-factors" in found
    backbones, full = (cases([wrong_backbones.Sound], kind="backbone", quick=quick) for quick in (True, False))
    assert len(backbones) == len(clauses(BACKBONE))
    assert full.keys() - backbones.keys() == {"Sound-torch.compile", "Sound-torch.export", "Sound-onnx"}


def test_a_clause_that_holds_passes_and_one_that_does_not_is_an_assertion_error_with_its_cause() -> None:
    found = cases([wrong.DeadParameter, wrong.NeedsContiguous], quick=True)
    found["DeadParameter-copies"]()
    with pytest.raises(AssertionError, match=r"^gradients: gradient missing: unused \(none\)$"):
        found["DeadParameter-gradients"]()
    with pytest.raises(AssertionError, match=r"^attention layer: RuntimeError: view size is not compatible") as caught:
        found["NeedsContiguous-attention-layer"]()
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Sound-position-bias", "not supported: accepts_bias is False"),
        ("Sound-order-of-tokens", "not declared: equivariant is False"),
    ],
)
def test_a_clause_that_is_not_declared_or_not_supported_is_skipped_with_its_reason(name: str, reason: str) -> None:
    found = cases([wrong.Sound], quick=True)
    with pytest.raises(pytest.skip.Exception, match=f"^{reason}"):
        found[name]()


def test_after_declarations_that_cannot_be_read_the_other_clauses_are_skipped() -> None:
    found = cases([wrong.FractionalWidth], quick=True)
    found["FractionalWidth-constructor"]()
    with pytest.raises(AssertionError, match=r"^declarations: out_dim must be a whole number"):
        found["FractionalWidth-declarations"]()
    with pytest.raises(pytest.skip.Exception, match=r"^fix 'declarations' first: out_dim must be"):
        found["FractionalWidth-gradients"]()


def test_options_of_the_checks() -> None:
    found = cases([wrong.Sound], quick=True, dim=24, num_heads=3)
    assert found["Sound-gradients"].args[1]().build().head_dim == 8
    found = cases([wrong_backbones.Sound], kind="backbone", attention="linear", img_size=(32, 16), quick=True)
    assert found["Sound-shapes"].args[1]().size == (32, 16)


def test_nothing_is_imported_or_built_before_a_case_runs_and_then_once() -> None:
    built = []

    def factory(**options: object) -> wrong_backbones.Sound:
        built.append(options)
        return wrong_backbones.Sound(**options)

    found = cases([factory, "no_such_package:Model"], kind="backbone", img_size=32, quick=True)
    assert not built
    name = f"{factory.__qualname__}-"
    for clause in ("constructor", "intermediates"):
        found[name + clause]()
    assert len(built) == 1
    with pytest.raises(linvit.UserError, match="no_such_package:Model' cannot be imported"):
        found["no_such_package:Model-shapes"]()


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        ("focused", {}, r"specs must be a list of names, specs or classes; got 'focused'\. Write \['focused'\]"),
        (LINEAR, {}, "specs must be a list"),
        (
            ["focused"],
            {"kind": "mechanism"},
            "kind must be one of attention, backbone; got 'mechanism'",
        ),
    ],
)
def test_mistakes_are_user_errors(specs: object, options: dict[str, str], message: str) -> None:
    with pytest.raises(linvit.UserError, match=message):
        parametrize_with_checks(specs, **options)


def test_linvit_testing_imports_pytest_only_where_it_is_used() -> None:
    for path in Path(linvit.testing.__file__).parent.rglob("*.py"):
        statements = ast.parse(path.read_text(encoding="utf-8")).body
        assert not [line for line in map(ast.unparse, statements) if line.startswith(("import pytest", "from pytest"))]
