"""TaylorShift equals its authors' code and its formula, in both forms."""

import pytest
import torch
from torch.nn import functional as F

from linvit import AttentionLayer, Grid, UserError
from linvit.attention.taylor_shift import TaylorShiftAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids

GRIDS = [Grid((3, 4), num_prefix=1), Grid((1, 7)), Grid((4, 6), (2, 3), num_prefix=1)]
OPTIONS = [
    {"form": "direct"},
    {"form": "efficient"},
    {"form": "efficient", "output_normalized": True, "a": 0.7, "b": -0.9, "c": 1.3},
    {"form": "direct", "output_normalized": True, "a": 0.7, "b": -0.9, "c": 1.3},
    {"form": "efficient", "normalize_input": False},
    {"form": "direct", "normalize_input": False},
]


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "taylor_shift", **options}, grid)
    given = inputs(module, grid, grad=True)
    q, k = given.q, given.k
    if module.temperature is not None:
        q, k = q / (q * q).sum(-1, keepdim=True).sqrt(), k / (k * k).sum(-1, keepdim=True).sqrt()
        q = q * module.temperature
    x = q @ k.mT
    weights = module.a * x**2 + module.b * x + module.c
    want = weights @ given.v / weights.sum(-1, keepdim=True)
    if module.output_normalized:
        want = want * (grid.num_queries / 8) ** 0.5
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-9)
    left, right = module.factors(given.q, given.k, grid)
    assert left.shape[-1] == module.rank_bound(Grid((10, 10))) == 45
    assert_near(left @ right.mT @ given.v, want, 1e-12)


def test_takes_the_cheaper_form() -> None:
    """At 45 features from 45 tokens on, whatever grid the layer was made for."""
    module = TaylorShiftAttention(24, 3, Grid((7, 7)))
    assert [module._is_direct(Grid((1, tokens))) for tokens in (44, 46)] == [True, False]
    assert module._is_direct(Grid((10, 10), (4, 4)))


@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_zeros_give_the_mean_and_finite_gradients(form: str) -> None:
    grid = Grid((2, 3))
    module = mechanism({"name": "taylor_shift", "form": form}, grid)
    q = torch.zeros(1, 3, 6, 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 3, 6, 8, dtype=torch.float64)
    out = module(q, q, v, grid)
    assert_near(out, v.mean(2, keepdim=True).expand_as(v), 1e-12)
    out.sum().backward()
    assert q.grad.isfinite().all()


@both_precisions
@of_case("taylor_shift_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    """Whose direct form multiplies v in place and has no gradient with `output_normalized`."""
    official = {**golden.constructor, "form": golden.kwargs["form"]}
    given = golden.inputs(dtype)
    grid = Grid((1, given[0].shape[2]))
    module = TaylorShiftAttention(official.pop("dim"), official.pop("num_heads"), grid, **official).to(dtype)
    module.load_state_dict(golden.parameters())
    golden.check_call(module(*given, grid), given)
    golden.check_parameters(module, lambda name: name)


@both_precisions
@of_case("taylor_shift")
def test_equals_reference_with_projections(golden: Golden, dtype: torch.dtype) -> None:
    official = golden.constructor
    (x,) = given = golden.inputs(dtype)
    grid = Grid((1, x.shape[1]))
    spec = {"name": "taylor_shift", "output_normalized": official["output_normalized"]}
    layer = AttentionLayer(official["dim"], official["num_heads"], grid, attention=spec).to(dtype)

    def ours(name: str) -> str:
        return f"mechanism.{name}" if name == "temperature" else name

    layer.load_state_dict({ours(name): tensor for name, tensor in golden.parameters().items()})
    golden.check_call(layer(x, grid), given)
    golden.check_parameters(layer, ours)


def test_negative_weights_are_refused() -> None:
    with pytest.raises(UserError, match=r"give negative weights; take c of at least b\^2 / 4 a = 2"):
        TaylorShiftAttention(24, 3, Grid((2, 3)), b=2.0)


def test_weights_leave_a_key_out_by_a_mask() -> None:
    grid = Grid((2, 3))
    mask = torch.tensor([[True, True, False, True, True, True]])
    for form in ("direct", "efficient"):
        module = mechanism({"name": "taylor_shift", "form": form}, grid)
        q, k, v, _ = inputs(module, grid, batch=1)
        want = mechanism({"name": "taylor_shift", "form": form}, grid)(
            q, k[:, :, mask[0]], v[:, :, mask[0]], Grid((2, 3), (1, 5))
        )
        assert_near(module(q, k, v, grid, mask=mask), want, 1e-12)
        assert F.mse_loss(module(q, k, v, grid), want) > 1e-6
