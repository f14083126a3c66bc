"""The contracts of attention mechanisms and backbones, held over everything registered.

A new name is tested by existing. What a mechanism cannot do it declares on its class, and the tests read it there.
"""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import linvit
from linvit import Attention, AttentionLayer, Grid, UserError
from linvit.analysis import attention_cost, attention_matrix, rank
from linvit.registry import attentions
from linvit.testing import Verdict, check_backbone
from linvit.testing.backbone.images import Subject
from linvit.testing.backbone.shape import constructor
from tests.families import WIDTHS_AND_DEPTHS, families, kinds, small
from tests.helpers import (
    assert_near,
    assert_same_gradients,
    inputs,
    low_rank,
    mechanism,
    perturb,
    randn,
    relative_error,
)

GRID = Grid((6, 8))
OTHERS = [Grid((4, 12)), Grid((8, 6), num_prefix=1), Grid((7, 9), num_prefix=2), Grid((12, 14))]
REDUCED = Grid((6, 8), (3, 4), num_prefix=1)
SIZES = [Grid((14, 14)), Grid((7, 9)), Grid((1, 50)), Grid((50, 1)), Grid((13, 31))]
DIM, HEADS = 24, 3
HALVES = [torch.float16, torch.bfloat16]
POWER = {"O(N)": 1, "O(N^2)": 2}

attention = pytest.mark.parametrize("name", linvit.list_attentions())
builtin = pytest.mark.parametrize(
    "name", [name for name, (owner, *_) in attentions.entries().items() if owner.owner == "linvit"]
)
with_bias = pytest.mark.parametrize(
    "name", [name for name in linvit.list_attentions() if attentions.get(name).takes_bias]
)
without_bias = pytest.mark.parametrize(
    "name", [name for name in linvit.list_attentions() if not attentions.get(name).takes_bias]
)


def run(module: Attention, grid: Grid, **options: Any) -> Tensor:
    """The mechanism on random inputs of what it declares."""
    return inputs(module, grid, **options)(module, grid)


def run_or_refused(module: Attention, grid: Grid) -> Tensor | None:
    """The output; None where the mechanism cannot follow and says so, naming the grids."""
    try:
        return run(module, grid)
    except UserError as error:
        for size in (module.grid.size, grid.size, grid.keys_size):
            assert f"{size[0]}x{size[1]}" in str(error)  # noqa: PT017
        return None


def tied(name: str) -> bool:
    """Whether the projections leave no room for fewer keys than queries."""
    return mechanism(name, GRID).projections != "qkv"


def supported(name: str, grid: Grid) -> Grid:
    """The grid, or that with as many keys as queries where the mechanism needs it."""
    if tied(name) or run_or_refused(mechanism(name, grid), grid) is None:
        return grid._replace(kv_size=None)
    return grid


# Attention


@attention
def test_constructor_has_the_contracts_arguments_and_options_with_defaults(name: str) -> None:
    parameters = inspect.signature(attentions.get(name)).parameters
    assert list(parameters)[:3] == ["dim", "num_heads", "grid"]
    assert parameters["key_dim"].default is None
    options = [p for p in parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]  # those of the parent
    for parameter in options[3:]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default is not inspect.Parameter.empty


@builtin
def test_file_opens_with_formula_paper_and_cost(name: str) -> None:
    text = inspect.getmodule(attentions.get(name)).__doc__
    assert "`" in text.splitlines()[0]
    assert "Paper:" in text
    assert "Cost:" in text


@attention
@pytest.mark.parametrize("batch", [1, 3])
def test_shape(name: str, batch: int) -> None:
    module = mechanism(name, GRID)
    out = run(module, GRID, batch=batch)
    assert out.shape == (batch, HEADS, GRID.num_queries, module.out_dim // HEADS)
    assert out.isfinite().all()


@attention
@pytest.mark.parametrize("grid", OTHERS, ids=str)
def test_another_grid_is_followed_or_refused(name: str, grid: Grid) -> None:
    """One instance, another grid; nothing of it stays behind. A mechanism that cannot follow names both grids."""
    module = mechanism(name, Grid(GRID.size, num_prefix=grid.num_prefix))
    before = run(module, module.grid)
    out = run_or_refused(module, grid)
    if out is not None:
        assert out.shape[2] == grid.num_queries
        assert out.isfinite().all()
    assert torch.equal(run(module, module.grid), before)


@attention
@pytest.mark.parametrize("num_prefix", [0, 1])
def test_one_instance_sees_many_grids(name: str, num_prefix: int) -> None:
    """One after the other; each as if it were the first."""
    grids = [grid._replace(num_prefix=num_prefix) for grid in SIZES]
    module = mechanism(name, grids[0])
    outs = [run_or_refused(module, grid) for grid in grids]
    assert outs[0] is not None
    for grid, out in zip(grids, outs, strict=True):
        if out is not None:
            assert out.shape[2] == grid.num_queries
            assert out.isfinite().all()
            assert torch.equal(run(mechanism(name, grids[0]), grid), out)


@attention
def test_fewer_keys_than_queries(name: str) -> None:
    if tied(name):
        with pytest.raises(UserError, match="reduc"):
            AttentionLayer(DIM, HEADS, GRID, attention=name, sr_ratio=2)
        return
    out = run_or_refused(mechanism(name, REDUCED), REDUCED)
    if out is not None:
        assert out.shape[2] == REDUCED.num_queries
        assert out.isfinite().all()


@attention
@pytest.mark.parametrize("num_prefix", [1, 2, 5])
def test_prefix_tokens_and_patches_see_each_other(name: str, num_prefix: int) -> None:
    grid = Grid((4, 6), num_prefix=num_prefix)
    module = mechanism(name, grid)
    given = inputs(module, grid)
    before = given(module, grid)
    assert before.shape[2] == num_prefix + 24
    for token in range(num_prefix + 1):  # the last is a patch
        v = given.v.clone()
        v[:, :, token] += 1
        change = (given._replace(v=v)(module, grid) - before).abs().amax((0, 1, 3))
        others = change[num_prefix + 1 :] if token < num_prefix else change[:num_prefix]
        assert others.min() > 1e-6 * before.abs().max()


@attention
def test_narrow_keys(name: str) -> None:
    if not attentions.get(name).narrow_keys:
        with pytest.raises(UserError, match="key_dim=4 for values of 8 channels per head"):
            mechanism(name, GRID, key_dim=4)
        assert mechanism(name, GRID, key_dim=DIM // HEADS).key_dim == DIM // HEADS
        return
    module = mechanism(name, GRID, key_dim=4)
    assert module.key_dim == 4
    assert run(module, GRID).shape == (2, HEADS, GRID.num_queries, module.out_dim // HEADS)


@attention
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("loud", [1, 64])
def test_a_sample_does_not_see_its_batch(name: str, loud: int, training: bool) -> None:
    """Not even where its neighbours are of another scale, as one maximum over the batch would show."""
    module = mechanism(name, GRID).train(training)
    scales = torch.tensor([1, loud, 1 / loud, loud], dtype=torch.float64)
    given = inputs(module, GRID, batch=4).map(lambda x: x * scales.view(-1, *[1] * (x.ndim - 1)))
    together = given(module, GRID)
    for i in range(4):
        alone = given.map(lambda x, i=i: x[i : i + 1])
        assert_near(together[i : i + 1], alone(module, GRID), 1e-10)


@attention
@pytest.mark.parametrize("every", [False, True], ids=["one", "all"])
def test_nan_goes_through_and_stays_in_its_sample(name: str, every: bool) -> None:
    module = mechanism(name, GRID)
    clean = inputs(module, GRID)
    want = clean(module, GRID)
    for index in range(len(clean.tensors)):
        given = clean.map(torch.clone)
        sample = given.tensors[index][0]
        sample.fill_(torch.nan) if every else sample.view(-1)[-1:].fill_(torch.nan)
        given = given.map(lambda x: x.requires_grad_())
        out = given(module, GRID)
        out.sum().backward()
        assert out[0].isnan().any()
        assert_near(out[1], want[1], 1e-10)


@attention
def test_non_contiguous_inputs(name: str) -> None:
    """As a host hands them over: views of one fused projection, heads transposed."""
    module = mechanism(name, GRID)
    given = inputs(module, GRID)
    views = given.map(lambda x: x.transpose(1, -1).contiguous().transpose(1, -1))
    assert not views.q.is_contiguous()
    assert_near(views(module, GRID), given(module, GRID), 1e-13)


@attention
def test_evaluation_is_deterministic_and_keeps_nothing(name: str) -> None:
    module = mechanism(name, GRID)
    given = inputs(module, GRID)
    attributes, state = set(vars(module)), copy.deepcopy(module.state_dict())
    first = given(module, GRID)
    assert torch.equal(given(module, GRID), first)
    assert set(vars(module)) == attributes
    assert all(torch.equal(t, state[key]) for key, t in module.state_dict().items())


@attention
def test_inputs_are_not_written_to(name: str) -> None:
    module = mechanism(name, GRID)
    given = inputs(module, GRID)
    copies = given.map(torch.clone)
    given(module, GRID)
    assert all(torch.equal(x, y) for x, y in zip(given.tensors, copies.tensors, strict=True))


@attention
def test_gradients_reach_every_input_and_parameter(name: str) -> None:
    module = mechanism(name, GRID)
    given = inputs(module, GRID, grad=True)
    out = given(module, GRID)
    (out * randn(*out.shape, seed=9)).sum().backward()
    tensors = {**{f"input {i}": x for i, x in enumerate(given.tensors)}, **dict(module.named_parameters())}
    for key, tensor in tensors.items():
        assert tensor.grad is not None, key
        assert tensor.grad.isfinite().all(), key
        assert tensor.grad.abs().max() > 0, key


@attention
def test_state_dict_round_trip_deepcopy_and_pickle(name: str) -> None:
    module = mechanism(name, GRID)
    fresh = linvit.create_attention(name, dim=DIM, num_heads=HEADS, grid=GRID).double().eval()
    fresh.load_state_dict(module.state_dict())
    given = inputs(module, GRID)
    want = given(module, GRID)
    for twin in (fresh, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(given(twin, GRID), want)


@attention
def test_bad_dim_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="dim 25 is not divisible by num_heads 3"):
        linvit.create_attention(name, dim=25, num_heads=3, grid=GRID)


@attention
@pytest.mark.parametrize("grid", [GRID, Grid((3, 4), num_prefix=1)], ids=str)
def test_matrix_times_values_is_the_output(name: str, grid: Grid) -> None:
    """Also where the matrix depends on the values: then it is that of the values at hand.

    A mechanism that widens its output has one matrix per head of the output, each on values of its own making.
    """
    module = mechanism(name, grid)
    given = inputs(module, grid)
    matrix = attention_matrix(module, given.q, given.k, grid, v=given.v, **given.extra)
    assert matrix.isfinite().all()
    if module.channelwise:  # (B, h, d, N, M)
        assert matrix.shape == (2, HEADS, module.head_dim, grid.num_queries, grid.num_keys)
        mixed = (matrix @ given.v.mT.unsqueeze(-1)).squeeze(-1).mT
    else:
        assert matrix.shape == (2, module.out_dim // module.head_dim, grid.num_queries, grid.num_keys)
        mixed = matrix @ given.v if module.out_dim == module.dim else None
    if module.probeable:
        assert mixed is not None
        bias = given._replace(v=torch.zeros_like(given.v))(module, grid)
        assert_near(mixed, given(module, grid) - bias, 1e-10)
    elif mixed is not None:
        assert_near(mixed, given(module, grid), 1e-10)


@attention
@pytest.mark.parametrize("grid", [GRID, Grid((3, 4), num_prefix=1), REDUCED], ids=str)
def test_factors_are_those_of_the_matrix(name: str, grid: Grid) -> None:
    grid = supported(name, grid)
    module = mechanism(name, grid)
    given = inputs(module, grid)
    factors = module.factors(given.q, given.k, grid)
    if factors is not None:
        matrix = attention_matrix(module, given.q, given.k, grid, v=given.v, **given.extra)
        assert_near(factors[0] @ factors[1].mT, matrix, 1e-10)
        assert (rank(matrix) <= factors[0].shape[-1]).all()


@attention
@pytest.mark.parametrize("grid", [*OTHERS, REDUCED, Grid((3, 4), (5, 5), num_prefix=2)], ids=str)
def test_factors_times_values_are_the_output(name: str, grid: Grid) -> None:
    grid = supported(name, grid)
    module = mechanism(low_rank(name), grid)
    given = inputs(module, grid)
    factors = module.factors(given.q, given.k, grid)
    if factors is None:
        return
    left, right = factors
    if module.channelwise:  # (B, h, d, N, r), (B, h, d, M, r)
        mixed = (left @ (right.mT @ given.v.mT.unsqueeze(-1))).squeeze(-1).mT
    else:
        mixed = left @ (right.mT @ given.v)
    bias = given._replace(v=torch.zeros_like(given.v))(module, grid)
    assert_near(mixed + bias, given(module, grid), 1e-10)


@builtin
@pytest.mark.parametrize("low", [False, True])
def test_a_rank_below_the_tokens_by_construction_has_factors_of_as_many_columns(name: str, low: bool) -> None:
    """There are none only where the matrix may be of full rank: a convolution or the token itself is part of it."""
    grid = Grid((9, 11), num_prefix=1)
    module = mechanism(low_rank(name) if low else name, grid)
    given = inputs(module, grid)
    factors, bound = module.factors(given.q, given.k, grid), module.rank_bound(grid)
    if factors is None:
        assert bound == 100
    else:
        assert [min(100, factor.shape[-1]) for factor in factors] == [bound, bound]


@attention
@pytest.mark.parametrize("grid", [GRID, Grid((9, 11), num_prefix=1), REDUCED], ids=str)
def test_rank_stays_within_its_bound(name: str, grid: Grid) -> None:
    grid = supported(name, grid)
    module = mechanism(name, grid)
    given = inputs(module, grid)
    bound = module.rank_bound(grid)
    assert 1 <= bound <= min(grid.num_queries, grid.num_keys)
    matrix = attention_matrix(module, given.q, given.k, grid, v=given.v, **given.extra)
    assert (rank(matrix) <= bound).all()


@builtin
def test_built_in_mechanism_declares_its_complexity(name: str) -> None:
    assert mechanism(name, GRID).complexity in POWER


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


@attention
def test_nothing_grows_faster_than_declared(name: str) -> None:
    """From 784 to 3136 tokens: operations, and the largest tensor of a forward and backward pass."""
    sizes = []
    for grid in (Grid((28, 28)), Grid((56, 56))):
        module = mechanism(name, grid, dim=8, num_heads=1, dtype=torch.float32)
        given = inputs(module, grid, batch=1, dtype=torch.float32, grad=True)
        with LargestTensor() as largest:
            given(module, grid).sum().backward()
        sizes.append([largest.elements, attention_cost(name, grid, dim=8, num_heads=1).total])
    if module.complexity is None:
        return
    power = POWER[module.complexity]
    assert all(large <= 1.05 * 4**power * small for small, large in zip(*sizes, strict=True))
    if power > 1:
        assert sizes[1][1] > 1.05 * 4 ** (power - 1) * sizes[0][1]  # nor is it declared slower than it is


@attention
def test_probing_leaves_no_trace(name: str) -> None:
    module = mechanism(name, GRID, dtype=torch.float32).train()
    fired: list[object] = []
    module.register_forward_hook(lambda *_: fired.append(1))
    given = inputs(module, GRID, dtype=torch.float32)
    state = copy.deepcopy(module.state_dict())
    attention_matrix(module, given.q, given.k, GRID, v=given.v, **given.extra)
    assert not fired
    assert module.training
    assert all(torch.equal(t, state[key]) and t.dtype == state[key].dtype for key, t in module.state_dict().items())


@attention
def test_layer_hosts_it(name: str) -> None:
    layer = perturb(AttentionLayer(DIM, HEADS, GRID, attention=name).double())
    x = randn(2, GRID.num_queries, DIM, grad=True)
    out = layer(x, GRID)
    assert out.shape == x.shape
    (out * randn(*out.shape, seed=3)).sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in [x, *layer.parameters()])


@with_bias
def test_bias_changes_the_output_of_a_mechanism_that_takes_one(name: str) -> None:
    module = mechanism(name, GRID)
    given = inputs(module, GRID)
    bias = randn(1, HEADS, GRID.num_queries, GRID.num_keys, seed=8, grad=True)
    out = module(given.q, given.k, given.v, GRID, bias=bias, **given.extra)
    assert relative_error(out, given(module, GRID)) > 1e-3
    assert torch.autograd.grad(out.square().sum(), bias)[0].abs().max() > 0


@without_bias
def test_bias_is_refused_by_a_mechanism_that_takes_none(name: str) -> None:
    assert "bias" not in inspect.signature(attentions.get(name).forward).parameters
    layer = AttentionLayer(DIM, HEADS, GRID, attention=name)
    with pytest.raises(UserError, match="takes no position bias"):
        layer(torch.randn(1, 48, DIM), GRID, bias=torch.zeros(1, HEADS, 48, 48))


class Fixed(nn.Module):
    """A layer at one grid, so that only tensors are arguments."""

    def __init__(self, layer: AttentionLayer, grid: Grid) -> None:
        super().__init__()
        self.layer = layer
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.grid)


def assert_finite(name: str, dtype: torch.dtype, autocast: bool, scale: float, grid: Grid, **sizes: int) -> None:
    """Output and gradients are finite, and the output has v's dtype; under autocast the parameters are in float32."""
    module = mechanism(name, grid, dtype=torch.float32 if autocast else dtype, **sizes).train()
    given = inputs(module, grid, batch=1, dtype=dtype, scale=scale, grad=True)
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = given(module, grid)
    out.float().mean().backward()
    assert out.dtype == dtype
    assert out.isfinite().all()
    for key, tensor in {**dict(enumerate(given.tensors)), **dict(module.named_parameters())}.items():
        assert tensor.grad is not None, key
        assert tensor.grad.isfinite().all(), key


precisions = pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
ways = pytest.mark.parametrize("autocast", [False, True], ids=["half", "autocast"])
scales = pytest.mark.parametrize("scale", [1e-3, 1.0, 16.0])


@attention
@precisions
@ways
@scales
def test_half_precision_is_finite(name: str, dtype: torch.dtype, autocast: bool, scale: float) -> None:
    assert_finite(name, dtype, autocast, scale, Grid((14, 14)))


@pytest.mark.slow
@attention
@precisions
@ways
@scales
def test_half_precision_is_finite_at_12544_tokens(name: str, dtype: torch.dtype, autocast: bool, scale: float) -> None:
    assert_finite(name, dtype, autocast, scale, Grid((112, 112)), dim=8, num_heads=1)


@pytest.mark.slow
@attention
def test_compiles_into_one_graph(name: str) -> None:
    layer = perturb(AttentionLayer(DIM, HEADS, GRID, attention=name))
    compiled = torch.compile(layer, fullgraph=True)
    for grid in (GRID, Grid((4, 5))):
        x = randn(2, grid.num_queries, DIM, dtype=torch.float32, grad=True)
        assert_same_gradients(compiled(x, grid), layer(x, grid), [x, *layer.parameters()], 1e-4)


@pytest.mark.slow
@attention
def test_exports(name: str) -> None:
    module = Fixed(perturb(AttentionLayer(DIM, HEADS, GRID, attention=name)), GRID).eval()
    x = randn(2, GRID.num_queries, DIM, dtype=torch.float32)
    exported = torch.export.export(module, (x,))
    assert_near(exported.module()(x), module(x), 1e-6)


# Backbones


@pytest.mark.parametrize("name", families().values(), ids=families())
def test_every_family_keeps_the_contract(name: str) -> None:
    """A model with few channels and blocks."""
    report = check_backbone(small(name), quick=True)
    assert report.passed, f"\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize("name", kinds())
def test_every_kind_of_backbone_keeps_the_contract_in_full(name: str) -> None:
    """Compiled, exported, and on large images."""
    report = check_backbone(small(name))
    assert report.passed, f"\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize("name", families().values(), ids=families())
def test_one_of_every_family_keeps_the_contract_at_its_own_size(name: str) -> None:
    spec = {key: value for key, value in small(name).items() if key not in WIDTHS_AND_DEPTHS}
    report = check_backbone(spec, quick=True)
    assert report.passed, f"\n{report}"


@pytest.mark.parametrize("name", linvit.list_backbones())
def test_every_backbone_names_the_contracts_arguments(name: str) -> None:
    assert constructor(Subject(name, attention=None, img_size=64, quick=True)).verdict is Verdict.PASS
