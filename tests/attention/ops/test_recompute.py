"""Recomputing in backward changes what is kept, and neither outputs nor gradients, whoever differentiates."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import linvit
from linvit import Attention, Grid
from linvit.analysis.operations import kept_for_backward
from linvit.attention.ops.decorators import in_transform
from linvit.registry import attentions
from tests.helpers import assert_near, mechanism, own_names, randn

GRID = Grid((4, 6))
every = pytest.mark.parametrize("name", [name for name in own_names(attentions) if attentions.get(name).recompute])


def qkv(of: Attention, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys and values of one batch; the keys are the queries where they are not projected."""
    q, k, v = (randn(2, of.num_heads, GRID.num_queries, 8, seed=i, dtype=dtype, grad=True) for i in range(3))
    return [q, q if of.host.project == "qv" else k, v]


def layer_input(of: Attention) -> dict[str, Tensor]:
    """The layer's input, for a mechanism that takes it."""
    return {"x": randn(2, GRID.num_queries, of.dim, seed=4, dtype=next(of.parameters()).dtype)} if of.host.input else {}


def gradients(of: Attention, twice: bool = False) -> list[Tensor]:
    """Output and gradients of inputs and parameters; or gradients of a sum of squares of these."""
    given = qkv(of)
    sources = [given[0], *given[given[1] is given[0] :][1:], *of.parameters()]
    out = of(*given, GRID, **layer_input(of))
    found = torch.autograd.grad(out.square().sum(), sources, create_graph=twice, allow_unused=True)
    if twice:
        total = torch.stack([g.square().sum() for g in found if g is not None]).sum()
        found = torch.autograd.grad(total, sources, allow_unused=True)
    return [out, *(torch.zeros(()) if g is None else g for g in found)]


@every
@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["once", "twice"])
def test_gradients_are_those_without_recomputing(name: str, twice: bool) -> None:
    if twice and name in ("linformer", "sla"):
        pytest.skip("torch's kernel of softmax attention has no second derivative")
    of = mechanism(name, GRID)
    found = gradients(of, twice)
    of.recompute = False
    for got, want in zip(found, gradients(of, twice), strict=True):
        assert_near(got, want, 1e-9)


@every
def test_nothing_but_the_inputs_is_kept_in_the_precision_in_which_they_came(name: str) -> None:
    of = mechanism(name, GRID, dtype=torch.float32)
    given = qkv(of, torch.bfloat16)
    work = partial(of, *given, GRID, **layer_input(of))
    copies_of_v = {"focused": 1}.get(name, 2 * ("convolution" in of.matrix_parts()))
    cast = sum(conv.weight.nbytes // 2 for conv in of.modules() if isinstance(conv, nn.Conv1d | nn.Conv2d))
    taken = sum(
        x.nbytes for x in layer_input(of).values() if name in ("vssd", "vittt", "gdla", "delta", "gated_delta")
    )  # all of it, not its means
    most = (len({id(x) for x in given}) + copies_of_v) * given[0].nbytes + cast + taken
    with torch.autocast("cpu", torch.bfloat16):
        kept = kept_for_backward(work, of)
        of.recompute = False
        assert kept <= most < kept_for_backward(work, of)


def test_frozen_parameters_and_inputs_without_gradients_get_none() -> None:
    of = mechanism("focused", GRID)
    of.scale.requires_grad_(False)
    q, k, v = qkv(of)
    of(q.detach(), k, v, GRID).sum().backward()
    assert q.grad is None
    assert of.scale.grad is None
    assert all(x.grad is not None for x in (k, v, of.positional_encoding))


def test_the_parameters_are_those_of_the_forward_pass() -> None:
    of, other = mechanism("focused", GRID), mechanism("focused", GRID)
    state = {name: (2 * p.detach()).requires_grad_() for name, p in of.named_parameters()}
    other.load_state_dict(state)
    out = torch.func.functional_call(of, state, (*qkv(of), GRID))
    found = torch.autograd.grad(out.sum(), list(state.values()))
    want = torch.autograd.grad(other(*qkv(of), GRID).sum(), list(other.parameters()))
    for got, expected in zip(found, want, strict=True):
        assert_near(got, expected, 1e-9)


def test_autocast_finds_no_weight_without_a_graph_in_its_cache() -> None:
    of = mechanism("enhanced_linear", GRID, dtype=torch.float32)
    given = qkv(of, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        of(*given, GRID)  # casts the weights of the convolutions
        of.recompute = False
        of(*given, GRID).sum().backward()
    assert all(p.grad is not None for p in of.parameters())


class TwoCalls(nn.Module):
    """A recomputed call of what another one gives, with one parameter in both."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(randn(3, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    @linvit.recomputed
    def first(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin()

    @linvit.recomputed
    def second(self, x: Tensor) -> Tensor:
        return (x * self.scale).exp()


def test_a_gradient_that_is_differentiated_counts_a_parameter_of_two_calls_once_by_each_path() -> None:
    module, x = TwoCalls(), randn(2, 3, seed=2)
    found = []
    for module.recompute in (True, False):
        (first,) = torch.autograd.grad(module(x).sum(), module.scale, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), module.scale)])
    for got, want in zip(*found, strict=True):
        assert_near(got, want, 1e-12)


def jvp(run: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
    """A directional derivative by dual numbers."""
    with forward_ad.dual_level():
        derivative = forward_ad.unpack_dual(run(forward_ad.make_dual(q, torch.ones_like(q)))).tangent
        assert derivative is not None
        return derivative


@pytest.mark.parametrize(
    "derive",
    [
        lambda run, q: torch.func.grad(lambda q: run(q).square().sum())(q),
        lambda run, q: torch.func.jvp(run, (q,), (torch.ones_like(q),))[1],
        lambda run, q: torch.func.vmap(run)(torch.stack([q, 2 * q])),
        lambda run, q: torch.autograd.functional.jacobian(lambda q: run(q)[0, 0, 0], q, vectorize=True),
        jvp,
    ],
    ids=["func.grad", "func.jvp", "func.vmap", "vectorized jacobian", "forward_ad"],
)
def test_other_ways_to_differentiate(derive: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
    of = mechanism("focused", GRID)
    q, k, v = qkv(of)
    found = derive(lambda q: of(q, k, v, GRID), q)
    of.recompute = False
    assert_near(found, derive(lambda q: of(q, k, v, GRID), q), 1e-9)


@pytest.mark.parametrize("spec", [{"name": "linformer", "attn_drop": 0.5}, {"name": "soft", "landmarks": "random"}])
def test_random_numbers_are_drawn_once(spec: linvit.registry.Spec) -> None:
    of = mechanism(spec, GRID).train()
    torch.manual_seed(0)
    found = gradients(of)
    of.recompute = False
    torch.manual_seed(0)
    for got, want in zip(found, gradients(of), strict=True):
        assert_near(got, want, 1e-12)


def test_torch_says_whether_a_transform_runs() -> None:
    seen = []
    torch.func.vmap(lambda x: (seen.append(in_transform()), x)[1])(torch.ones(2))
    assert [*seen, in_transform()] == [True, False], "torch._C._functorch.maybe_current_level says something else now"
