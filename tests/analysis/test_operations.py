"""Counted operations, against sums written out by hand and against torch's own counter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import linvit
from linvit import Grid, UserError
from linvit.analysis import attention_cost, count_operations, macs, num_parameters
from linvit.registry import attentions
from tests.helpers import inputs, mechanism, own_names

GRID = Grid((12, 14), num_prefix=1)
REDUCED = Grid((12, 14), (6, 7), num_prefix=1)


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


A, B = torch.ones(2, 3, 5, 4), torch.ones(2, 3, 4, 6)  # 120 and 144 numbers
PLANES = torch.ones(2, 3, 8, 6)  # 288 numbers
LONG = torch.ones(30, 4)
SQUARE = 9 * torch.eye(6).expand(2, 6, 6)  # symmetric and positive
OPERATORS: list[tuple[str, Callable[[], Any], tuple[int, int]]] = [  # products, elementwise
    ("matmul", lambda: A @ B, (2 * 3 * 5 * 4 * 6, 0)),
    ("einsum", lambda: torch.einsum("bhnd,bhmd->bhnm", A, A), (2 * 3 * 5 * 5 * 4, 0)),
    ("linear", lambda: F.linear(A, B[0, 0].mT, B[0, 0, 0]), (120 * 6, 0)),
    ("depthwise", lambda: F.conv2d(PLANES, torch.ones(3, 1, 3, 3), groups=3, padding=1), (288 * 9, 0)),
    ("views", lambda: A.mT.flatten(1).reshape(3, -1)[1:].unflatten(1, (4, -1)).contiguous().double(), (0, 0)),
    ("copies", lambda: torch.cat([A, A.clone(), torch.zeros(2, 3, 5, 4)]).roll(1, 0).repeat(2, 1, 1, 1), (0, 0)),
    ("indices", lambda: A[:, torch.tensor([0, 2])].gather(2, torch.zeros(2, 2, 1, 4, dtype=torch.long)), (0, 0)),
    ("broadcast", lambda: A * A[:, :, :1], (0, 120)),
    ("in place", lambda: A.clone().add_(A, alpha=0.5).relu_(), (0, 240)),
    ("exp", lambda: A.exp(), (0, 120)),
    ("sum", lambda: A.sum(-1), (0, 120)),
    ("softmax", lambda: A.softmax(-1), (0, 120)),
    ("layer norm", lambda: F.layer_norm(A, (4,), torch.ones(4), torch.ones(4)), (0, 120)),
    ("average pooling", lambda: F.avg_pool2d(PLANES, 2), (0, 288)),
    ("attention", lambda: F.scaled_dot_product_attention(A, A, A), (2 * 150 * 4, 2 * 120 + 150)),
    ("distances", lambda: torch.cdist(LONG, LONG), (900 * 4, 900)),
    ("inverse", lambda: torch.linalg.inv(SQUARE), (2 * 216, 0)),
    ("singular values", lambda: torch.linalg.svdvals(torch.ones(6, 9)), (7 * 9 * 36 + 4 * 216, 0)),
    ("pseudo-inverse", lambda: torch.linalg.pinv(torch.ones(9, 6)), (8 * 9 * 36 + 4 * 216, 0)),
]


@pytest.mark.parametrize(("function", "want"), [row[1:] for row in OPERATORS], ids=[row[0] for row in OPERATORS])
def test_operator_counts_what_it_computes(function: Callable[[], Any], want: tuple[int, int]) -> None:
    assert count_operations(Calls(function)) == (*want, 0)


@torch.library.custom_op("linvit_test::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return torch.cat([x, x])


def test_an_operator_of_a_plug_in_counts_its_largest_tensor() -> None:
    assert count_operations(Calls(lambda x: doubled(x) + 1), torch.ones(5)) == (0, 20, 0)


@pytest.mark.parametrize("name", own_names(attentions))
def test_products_of_a_mechanism_are_those_that_torch_counts(name: str) -> None:
    """Without fused kernels, of which torch's counter knows some, in some versions."""
    grid = Grid((5, 4), num_prefix=1)
    module = mechanism(name, grid)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        inputs(module, grid, batch=1)(module, grid)
    counted = attention_cost(name, grid, dim=24, num_heads=3)
    assert 2 * counted.matmul == counter.get_total_flops()
    assert counted.total > 0
    given = inputs(module, grid, batch=1)
    assert count_operations(module, given.q, given.k, given.v, grid, **given.extra) == counted  # not on meta


def test_what_cannot_run_on_meta_is_counted_on_the_cpu() -> None:
    class Decides(linvit.Attention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
            return q @ (k.mT @ v) if float(k.sum()) == 0 else v

    linvit.registry.attentions.register("decides")(Decides)
    try:
        assert attention_cost("decides", Grid((2, 3)), dim=8, num_heads=2).matmul == 2 * 6 * 8 * 4
    finally:
        linvit.registry.attentions._registered.pop("decides")


def test_a_refused_grid_is_the_mechanisms_own_error() -> None:
    with pytest.raises(UserError, match="as many keys as queries"):
        attention_cost("linear_angular", REDUCED, dim=24, num_heads=3)


class Mixer(nn.Module):
    """A convolution, a matrix product, a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, stride=4, groups=1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2).mT  # (1, N, 8)
        return self.head((self.norm(x).mT @ x).softmax(-1))  # (1, 8, 5)


BY_HAND = 6 * 8 * 3 * 16 + 6 * 8 * 8 + 8 * 8 * 5  # 2 x 3 patches


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_convolution_product_and_linear(device: str) -> None:
    model = Mixer().to(device)
    assert macs(model, (8, 12)) == BY_HAND
    assert num_parameters(model) == 8 * 48 + 8 + 16 + 8 * 5 + 5
    counted = count_operations(model, torch.zeros(1, 3, 8, 12, device=device))
    assert counted == (BY_HAND, 6 * 8 + 64, num_parameters(model))  # norm, softmax


def test_the_model_is_left_as_it_was() -> None:
    model = Mixer().train()
    model.norm.eval()
    macs(model, 8)
    assert [model.training, model.conv.training, model.norm.training] == [True, True, False]
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError):
        macs(model, 8, in_chans=4)
    assert model.training


def test_a_module_that_is_called_with_a_view_of_a_parameter_is_counted() -> None:
    """As in timm's PiT; the parameter is trained afterwards as before."""

    class Classed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 4))
            self.linear = nn.Linear(4, 3).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.token.expand(len(x), -1))  # type: ignore[no-any-return]

    model = Classed()
    assert count_operations(model, torch.zeros(2, 1)).matmul == 2 * 4 * 3
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, False]


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fused", [True, False])
def test_both_products_of_softmax_count_on_every_device(device: str, fused: bool) -> None:
    spec = {"name": "softmax", "fused": fused}
    model = linvit.create_backbone("deit_nano", attention=spec, num_classes=0).to(device)
    tokens, width, depth = 64, 96, 4
    block = 12 * tokens * width**2 + 2 * tokens**2 * width
    assert macs(model, 32) == tokens * 16 * 3 * width + depth * block
