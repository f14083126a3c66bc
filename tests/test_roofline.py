"""What operators move and compute, and the least time that a GPU of known peaks needs for it."""

import pytest
import torch

from benchmarks.roofline import Gpu, Operators, least_seconds


def test_operators_are_counted_by_their_tensors():
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    with Operators() as found:
        (a @ b).t().exp()  # a view moves nothing
        a.sum(0, keepdim=True).expand(5, 8) + torch.ones(())
    assert [(one.name, one.bytes, one.flops) for one in found.called] == [
        ("mm", 4 * (32 + 16 + 8), 2 * 4 * 8 * 2),
        ("exp", 4 * (8 + 8), 0),
        ("sum", 4 * (32 + 8), 0),
        ("ones", 4, 0),
        ("add", 4 * (8 + 1 + 40), 0),
    ]
    slow_memory, slow_products = Gpu(1e30, 1.0, ""), Gpu(1.0, 1e30, "")
    assert least_seconds(found.called, slow_memory) == sum(one.bytes for one in found.called)
    assert least_seconds(found.called, slow_products) == pytest.approx(128)


def test_products_in_a_wider_dtype_are_counted():
    a, b = (torch.ones(*shape, device="meta", dtype=torch.bfloat16) for shape in [(3, 4, 8), (3, 8, 2)])
    with Operators() as found:
        torch.bmm(a, b, out_dtype=torch.float32)
        torch.mm(a[0], b[0], out_dtype=torch.float32)
    assert [one.flops for one in found.called] == [2 * 3 * 4 * 8 * 2, 2 * 4 * 8 * 2]
