"""Grid arithmetic and what every mechanism gets from its base class."""

import pytest
import torch

import linvit
import linvit.analysis
from linvit import Attention, Grid, UserError


@pytest.mark.parametrize(
    ("grid", "keys_size", "num_queries", "num_keys"),
    [
        (Grid((3, 5)), (3, 5), 15, 15),
        (Grid((3, 5), num_prefix=2), (3, 5), 17, 17),
        (Grid((8, 6), (4, 3)), (4, 3), 48, 12),
        (Grid((8, 6), (4, 3), num_prefix=1), (4, 3), 49, 13),
    ],
)
def test_grid_counts_tokens(grid: Grid, keys_size: tuple[int, int], num_queries: int, num_keys: int) -> None:
    assert grid.keys_size == keys_size
    assert (grid.num_queries, grid.num_keys) == (num_queries, num_keys)


def test_sizes_follow_from_dim_and_heads() -> None:
    module = Attention(24, 3, Grid((4, 4)))
    assert (module.head_dim, module.key_dim, module.out_dim) == (8, 8, 24)
    assert Attention(24, 3, Grid((4, 4)), key_dim=5).key_dim == 5


def test_keys_are_left_out_only_where_that_is_declared() -> None:
    module = linvit.create_attention("taylor", dim=8, num_heads=2, grid=Grid((2, 2)))
    q = torch.zeros(1, 2, 4, 4)
    with pytest.raises(
        UserError, match=r"TaylorAttention cannot leave keys out .* pass the tokens of each image alone"
    ):
        module(q, q, q, Grid((2, 2)), mask=torch.tensor([[True, True, True, False]]))


def test_dim_that_heads_do_not_divide_is_refused_with_the_ways_out() -> None:
    with pytest.raises(UserError, match=r"dim 10 is not divisible by num_heads 3; .* 1, 2, 5, 10 heads"):
        Attention(10, 3, Grid((4, 4)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dim": 0}, "dim must be a whole number at least 1; got 0"),
        ({"dim": "8"}, "dim must be a whole number at least 1; got '8'"),
        ({"num_heads": True}, "num_heads must be a whole number at least 1; got True"),
        ({"num_heads": 2.0}, "num_heads must be a whole number at least 1; got 2.0"),
        ({"key_dim": 0}, "key_dim must be a whole number at least 1; got 0"),
        ({"grid": Grid((0, 4))}, r"the grid's size \(0, 4\): a side must be a whole number at least 1; got 0"),
        ({"grid": Grid((4, 4), (2, -1))}, r"the grid's kv_size \(2, -1\): a side must be .* got -1"),
        ({"grid": Grid((4, 4), num_prefix=-1)}, "the grid's num_prefix must be a whole number at least 0; got -1"),
    ],
)
def test_impossible_sizes_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Attention(**{"dim": 8, "num_heads": 2, "grid": Grid((4, 4))} | changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("grid", [Grid((4, 4), num_prefix=1), Grid((3, 5)), Grid((4, 4), (2, 2))], ids=str)
def test_a_grid_of_another_number_of_tokens_is_refused(grid: Grid) -> None:
    module = linvit.create_attention("softmax", dim=8, num_heads=2, grid=Grid((4, 4)))
    q, k, v = torch.randn(3, 1, 2, 16, 4)
    with pytest.raises(UserError, match=r"got 16 queries, 16 keys and 16 values for Grid.*, which has "):
        module(q, k, v, grid)


def test_keys_and_values_of_different_numbers_are_refused() -> None:
    module = linvit.create_attention("softmax", dim=8, num_heads=2, grid=Grid((4, 4)))
    q, k, v = torch.randn(3, 1, 2, 16, 4)
    with pytest.raises(UserError, match=r"got 16 queries, 16 keys and 15 values for Grid"):
        module(q, k, v[:, :, 1:], Grid((4, 4)))


def test_base_has_no_formula_and_says_so() -> None:
    class Empty(Attention):
        pass

    with pytest.raises(NotImplementedError, match="Empty has no core"):
        Empty(8, 2, Grid((2, 2)))(*torch.zeros(3, 1, 2, 4, 4), Grid((2, 2)))


def test_a_mechanism_is_a_forward_and_nothing_else() -> None:
    class Average(linvit.Attention):
        def forward(self, q, k, v, grid):  # type: ignore[no-untyped-def]
            return v.mean(-2, keepdim=True).expand(*q.shape[:3], -1)

    grid = Grid((2, 3))
    module = Average(8, 2, grid)
    v = torch.randn(1, 2, 6, 4)
    assert torch.equal(module(v, v, v, grid)[0, 0, 4], v[0, 0].mean(0))
    assert module.factors(v, v, grid) is None
    assert linvit.analysis.rank(linvit.analysis.attention_matrix(module, v, v, grid)).tolist() == [[1, 1]]


def test_print_shows_the_sizes() -> None:
    shown = repr(linvit.create_attention("linear", dim=24, num_heads=3, grid=Grid((4, 5), num_prefix=1)))
    assert "dim=24, num_heads=3, grid=((4, 5), None, 1)" in shown


def test_a_module_under_the_name_of_a_declaration_is_a_module() -> None:
    class Own(Attention):
        def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
            super().__init__(dim, num_heads, grid)
            self.gate = torch.nn.Linear(dim, dim)

    assert [*dict(Own(8, 2, Grid((2, 2))).named_children())] == ["gate"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"complexity": "linear"}, r"complexity must be one of O\(N\), .*; got 'linear'"),
        ({"project": "qq"}, "project must be one of qkv, qv, kv, qk; got 'qq'"),
        ({"norm": "bn"}, "norm must be one of none, ln, bn2d; got 'bn'"),
        ({"gate": "tanh"}, "gate must be one of none, linear, silu; got 'tanh'"),
        ({"accepts_bias": "no"}, "accepts_bias must be True or False; got 'no'"),
        ({"state_size": 1.5}, "state_size must be a whole number at least 1; got 1.5"),
        ({"max_rnk": 8}, "a declared field must be one of project, .*; got 'max_rnk'. Did you mean 'max_rank'?"),
        ({"no_matrix": "weights"}, "no_matrix says 'weights', so linear_in_values must be False; got True"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Attention(8, 2, Grid((2, 2))).declare(**fields)


class Noted(Attention):
    """Notes under what its formula runs."""

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid: Grid) -> torch.Tensor:
        self.seen = [q.dtype, torch.is_autocast_enabled("cpu")]
        self.calls = getattr(self, "calls", 0) + 1
        return (q.sin() * k.exp()).sum(-2, keepdim=True) * v


@pytest.mark.parametrize(
    ("precision", "seen"),
    [("float32", [torch.float32, False]), ("mixed", [torch.float32, False]), ("inherit", [torch.bfloat16, True])],
)
def test_the_formula_runs_in_the_declared_precision(precision: str, seen: list[object]) -> None:
    module = type("Other", (Noted,), {"precision": precision})(8, 2, Grid((2, 2)))
    q = torch.randn(1, 2, 4, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(q, q, q, Grid((2, 2))).dtype == torch.bfloat16
    assert module.seen == seen


@pytest.mark.parametrize("recompute", [True, False])
def test_the_formula_runs_once_more_in_backward_if_declared(recompute: bool) -> None:
    module, q = Noted(8, 2, Grid((2, 2))), torch.randn(1, 2, 4, 4, requires_grad=True)
    module.recompute = recompute
    module(q, q, q, Grid((2, 2))).sum().backward()
    assert module.calls == 1 + recompute
    with torch.no_grad():
        module(q, q, q, Grid((2, 2)))
    assert module.calls == 2 + recompute


def test_declarations_of_linvit_0_2_work_and_warn() -> None:
    words = r"Write host = linvit.Host\(project='qv', accepts_bias=True\) and "
    with pytest.warns(DeprecationWarning, match=words) as of_class:

        class Before(Attention):
            projections = "qv"
            takes_bias = True
            fewer_keys = False
            complexity = "O(N)"

            def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
                super().__init__(dim, num_heads, grid)
                self.max_rank = self.key_dim
                self.out_norm = "ln"

            @linvit.recomputed
            @linvit.full_precision
            def forward(self, q, k, v, grid):  # type: ignore[no-untyped-def]
                return q @ (k.mT @ v)

    words = r"facts = linvit.Facts\(max_rank=4\) in the class, or self.declare"
    with pytest.warns(DeprecationWarning, match=words) as of_instance:
        module = Before(8, 2, Grid((2, 2)))
    assert {warning.filename for warning in (*of_class, *of_instance)} == {__file__}
    assert module.host == linvit.Host(project="qv", accepts_bias=True, norm="ln")
    assert module.facts == linvit.Facts(complexity="O(N)", same_grid=True, max_rank=4)
    assert module.max_rank == 4
    q = torch.randn(1, 2, 4, 4)
    assert torch.equal(module(q, q, q, Grid((2, 2))), q @ (q.mT @ q))
