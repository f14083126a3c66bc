"""MonarchAttention equals its authors' code and its formula, block by block."""

import pytest
import torch
from torch import Tensor

from linvit import Grid
from linvit.attention.monarch import MonarchAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids

GRIDS = [Grid((3, 4), num_prefix=1), Grid((1, 7)), Grid((7, 1)), Grid((4, 5))]
OPTIONS = [
    {},
    {"steps": 1},
    {"steps": 3, "pad": "post"},
    {"block": 5, "pad": "post"},
    {"block": 5},
    {"block": 100},
    {"exact_prefix": True},
]


def naive_matrix(module: MonarchAttention, q: Tensor, k: Tensor, width: int, kept: list[bool], prefix: int) -> Tensor:
    """The matrix of one head, q and k (N, dk), by loops over blocks and places; places of no token are left out."""
    tokens, scale = len(q), q.shape[1] ** -0.5
    blocks = -(-tokens // width)
    start = blocks * width - tokens if module.pad == "pre" else 0
    token = {(i + start) // width * width + (i + start) % width: i for i in range(tokens)}

    def at(n: int, p: int) -> int | None:
        return token.get(n * width + p)

    alone = [[i for j in range(width) if (i := at(m, j)) is not None and kept[i]] for m in range(blocks)]
    zero = torch.zeros_like(q[0])
    sums = {(m, p): zero if (i := at(m, p)) is None else q[i] for m in range(blocks) for p in range(width)}
    for step in range(module.steps):
        inside = {(m, p): torch.softmax(scale * k[alone[m]] @ sums[m, p], 0) for m, p in sums if alone[m]}
        across = {}
        for i in range(tokens):
            n, p = divmod(i + start, width)
            logits = [
                scale * q[i] @ (r @ k[alone[m]]) - (r * r.log()).sum()
                for m in range(blocks)
                if alone[m] and (r := inside[m, p]) is not None
            ]
            shares = iter(torch.softmax(torch.stack(logits), 0))
            for m in range(blocks):
                across[n, p, m] = next(shares) if alone[m] else q.new_zeros(())
        if step < module.steps - 1:
            for m, p in sums:
                rows = [(across[n, p, m], q[i]) for n in range(blocks) if (i := at(n, p)) is not None and kept[i]]
                total = sum((share for share, _ in rows), q.new_zeros(())) + 1e-12
                sums[m, p] = sum((share * row for share, row in rows), zero) / total
    rows = []
    for i in range(tokens):
        n, p = divmod(i + start, width)
        row = q.new_zeros(tokens)
        for m in range(blocks):
            if alone[m]:
                row = row.index_add(0, torch.tensor(alone[m]), across[n, p, m] * inside[m, p])
        rows.append(row)
    matrix = torch.stack(rows)
    if prefix:
        logits = (scale * q[:prefix] @ k.T).masked_fill(~torch.tensor(kept), -torch.inf)
        matrix = torch.cat([logits.softmax(1), matrix[prefix:]])
    return matrix


def naive(module: MonarchAttention, q: Tensor, k: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
    kept = torch.ones(q.shape[0], q.shape[2]).bool() if mask is None else mask
    width, prefix = module.block or grid.size[1], grid.num_prefix if module.exact_prefix else 0
    return torch.stack(
        [
            torch.stack(
                [naive_matrix(module, q[b, h], k[b, h], width, kept[b].tolist(), prefix) for h in range(q.shape[1])]
            )
            for b in range(q.shape[0])
        ]
    )


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "monarch", **options}, grid, dim=8, num_heads=2)
    given = inputs(module, grid, batch=1, grad=True)
    want = naive(module, given.q, given.k, grid) @ given.v
    assert_same_gradients(given(module, grid), want, given.tensors, 1e-8)


@pytest.mark.parametrize("prefix", [0, 1])
def test_masked_keys_and_blocks_have_no_weight(prefix: int) -> None:
    """The reference leaves a block whose keys are all masked its share."""
    grid = Grid((3, 4), num_prefix=prefix)
    mask = torch.tensor([[True] * (3 + prefix) + [False] * 6 + [True, False, True]])
    module = mechanism({"name": "monarch", "exact_prefix": prefix > 0}, grid, dim=8, num_heads=2)
    q, k, v, _ = inputs(module, grid, batch=1)
    want = naive(module, q, k, grid, mask)
    assert_near(want.sum(-1), torch.ones_like(want[..., 0]), 1e-12)
    assert_near(module(q, k, v, grid, mask=mask), want @ v, 1e-10)


@both_precisions
@of_case("monarch_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    official = golden.constructor
    given = [golden.tensors[f"input.{name}"].to(dtype, copy=True).requires_grad_() for name in "qkv"]
    q, _, v = given
    grid = Grid((1, q.shape[2]))
    options = {"block": official["block_size"], "steps": official["num_steps"], "pad": official["pad_type"]}
    module = MonarchAttention(q.shape[1] * v.shape[3], q.shape[1], grid, key_dim=q.shape[3], **options)
    mask = golden.tensors.get("input.mask")
    out = module(*given, grid, mask=None if mask is None else mask > 0)
    golden.check_qkv(out, given)
