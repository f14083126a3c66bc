"""linvit's own attentions and backbones keep the contracts: the public kit, one case per name.

A new name is tested by existing. What a mechanism cannot do it declares on its class, and the kit reads it there.
"""

import inspect
from typing import Any

import pytest
import torch

from linvit import Grid, UserError
from linvit.registry import attentions, backbones
from linvit.registry.signatures import parameters_of, takes
from linvit.testing import Verdict, check_attention, check_backbone
from linvit.testing.backbone.images import BackboneSubject
from tests.families import SIZES, families, kinds, small
from tests.helpers import inputs, low_rank, mechanism, own_names
from tests.testing.helpers import attention_lines

ATTENTIONS = own_names(attentions)
LOW_RANK = [low_rank(name) for name in ATTENTIONS if len(low_rank(name)) > 1]
builtin = pytest.mark.parametrize("name", ATTENTIONS)


@builtin
def test_attention(name: str) -> None:
    report = check_attention(name, quick=True)
    assert report.passed, f"\n{report}"


@pytest.mark.slow
@builtin
def test_attention_in_full(name: str) -> None:
    """At the largest sizes."""
    report = check_attention(name)
    assert report.passed, f"\n{report}"


@pytest.mark.parametrize("name", families().values(), ids=families())
def test_family_of_backbones(name: str) -> None:
    """A model with few channels and blocks."""
    report = check_backbone(small(name), quick=True)
    assert report.passed, f"\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize("name", kinds())
def test_every_kind_of_backbone_in_full(name: str) -> None:
    """Compiled, exported, and on large images."""
    report = check_backbone(small(name))
    assert report.passed, f"\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize("name", families().values(), ids=families())
def test_one_of_every_family_at_its_own_size(name: str) -> None:
    spec = {key: value for key, value in small(name).items() if key not in SIZES}
    report = check_backbone(spec, quick=True)
    assert report.passed, f"\n{report}"


# What linvit asks of its own mechanisms and backbones beyond the contract


def test_every_preset_takes_the_arguments_of_the_contract() -> None:
    for name in own_names(backbones):
        parameters = parameters_of(backbones.get(name))
        assert parameters.keys() >= BackboneSubject.arguments.keys(), name
        assert BackboneSubject.defaults.items() <= parameters.items(), name


def test_options_are_keyword_only() -> None:
    for name in ATTENTIONS:
        parameters = inspect.signature(attentions.get(name)).parameters
        assert list(parameters)[:3] == ["dim", "num_heads", "grid"], name
        options = [p for p in parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]  # those of the parent
        assert all(option.kind is inspect.Parameter.KEYWORD_ONLY for option in options[3:]), name


def test_every_file_opens_with_formula_paper_and_cost() -> None:
    for name in ATTENTIONS:
        text = inspect.getmodule(attentions.get(name)).__doc__
        assert "`" in text.splitlines()[0], name
        assert "Paper:" in text, name
        assert "Cost:" in text, name


def test_complexity_is_declared() -> None:
    assert not [name for name in ATTENTIONS if mechanism(name, Grid((6, 8))).facts.complexity is None]


@builtin
def test_nan_comes_out_as_nan_and_raises_nothing(name: str) -> None:
    """So that a run that diverges is seen."""
    grid = Grid((4, 4))
    module = mechanism(name, grid, dtype=torch.float32)
    given = inputs(module, grid, dtype=torch.float32)
    given.v[0, 0, 0] = torch.nan
    out = given(module, grid)
    assert out[0].isnan().any()
    assert not out[1].isnan().any()
    assert given.map(lambda x: torch.full_like(x, torch.nan))(module, grid).isnan().all()


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if takes(attentions.get(name), "key_dim")])
def test_keys_may_be_narrower_than_values_or_are_refused(name: str) -> None:
    grid = Grid((4, 4))
    try:
        module, refusal = mechanism(name, grid, key_dim=4), ""
    except UserError as error:
        module, refusal = None, str(error)
    assert module is not None or "key_dim=4" in refusal
    assert module is None or inputs(module, grid)(module, grid).isfinite().all()


@pytest.mark.parametrize("spec", [*ATTENTIONS, *LOW_RANK], ids=str)
def test_a_rank_below_the_tokens_by_construction_has_factors_of_as_many_columns(spec: Any) -> None:
    """There are none only where the matrix may be of full rank (a convolution or the token itself is part of it), or
    depends on the values."""
    grid = Grid((9, 11), num_prefix=1)
    module = mechanism(spec, grid)
    given = inputs(module, grid)
    factors, bound = module.factors(given.q, given.k, grid), module.rank_bound(grid)
    if factors is None:
        assert bound == 100 or not module.facts.linear_in_values
    else:
        assert [min(100, factor.shape[-1]) for factor in factors] == [bound, bound]


@pytest.mark.parametrize("spec", LOW_RANK, ids=str)
def test_options_that_make_the_matrix_thin(spec: Any) -> None:
    for line in attention_lines(spec, {"equivalent matrix", "factors"}):
        assert line.verdict is Verdict.PASS, line
