"""Windows: the reference's blocks, and the definition written out token by token."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linvit import AttentionLayer, Grid, UserError
from linvit.attention.softmax import SoftmaxAttention
from linvit.layers.block import Block
from linvit.layers.mlp import Mlp
from linvit.layers.relative_positions import relative_position_bias
from linvit.layers.windows import WindowAttention
from linvit.weights.layouts.backbones import SWIN
from tests.golden_files import Golden, both_precisions, focused_spec, of_case
from tests.helpers import assert_near, assert_same_gradients, perturb, randn
from tests.layers.test_relative_positions import bicubic

DIM, HEADS = 12, 3


class TwoHeads(SoftmaxAttention):
    """Two heads of 4 channels, whatever the host has."""

    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(8, 2, grid)


def window_attention(size: tuple[int, int], **options: Any) -> WindowAttention:
    """A layer away from its initial values, in float64."""
    torch.manual_seed(0)
    return perturb(WindowAttention(DIM, HEADS, Grid(size), **options).double()).eval()


def tokens(*size: int, batch: int = 2, grad: bool = False) -> Tensor:
    return randn(batch, size[0] * size[1], DIM, grad=grad)


# The references


@both_precisions
@of_case("swin_block", "focused_swin_block")
def test_equals_reference_block(golden: Golden, dtype: torch.dtype) -> None:
    """The focused block among them: shifted, without a mask."""
    official = golden.constructor
    dim, grid = official["dim"], Grid(tuple(official["input_resolution"]))
    spec = focused_spec(golden) if official["attn_type"] == "L" else "softmax"
    window, shift = official["window_size"], official["shift_size"]
    assert shift in (0, window // 2)
    attn = WindowAttention(dim, official["num_heads"], grid, window=window, shifted=shift > 0, attention=spec)
    eps = {None: 1e-5, "LayerNorm(eps=1e-6)": 1e-6}[official.get("norm_layer")]
    block = Block(dim, attn, Mlp(dim, int(dim * official["mlp_ratio"])), 0.0, eps).to(dtype)
    block.load_state_dict(below(golden.parameters()))
    (x,) = given = golden.inputs(dtype)
    golden.check_call(block(x, grid), given)
    check_gradients(golden, block, "")


@both_precisions
@of_case("swin_window_attention")
def test_equals_reference_window_attention(golden: Golden, dtype: torch.dtype) -> None:
    official = golden.constructor
    grid = Grid(tuple(official["window_size"]))
    layer = WindowAttention(official["dim"], official["num_heads"], grid, window=grid.size[0]).to(dtype)
    layer.load_state_dict(below(golden.parameters(), "attn."))
    (x,) = given = golden.inputs(dtype)
    golden.check_call(layer(x, grid), given)
    check_gradients(golden, layer, "attn.")


def below(official: dict[str, Tensor], part: str = "") -> dict[str, Tensor]:
    """Our names inside a block, or inside a part of it, for the official ones."""
    state = SWIN.translate({f"layers.0.blocks.0.{part}{name}": t for name, t in official.items()})
    return {name.removeprefix(f"stages.0.blocks.0.{part}"): t for name, t in state.items()}


def check_gradients(golden: Golden, module: nn.Module, part: str) -> None:
    """Holds the gradient of every parameter to the stored one."""
    stored = {name.removeprefix("grad_param."): name for name in golden.named("grad_param.")}
    ours = below({name: golden.tensors[file] for name, file in stored.items()}, part)
    assert ours.keys() == dict(module.named_parameters()).keys()
    for own, file in zip(ours, stored.values(), strict=True):
        golden.check(file, module.get_parameter(own).grad)


# The definition


def naive(layer: WindowAttention, x: Tensor, size: tuple[int, int], side: int, shift: int) -> Tensor:
    """Softmax over all pairs of tokens of the padded map, those of other windows at minus infinity."""
    (height, width), batch = size, x.shape[0]
    padded = -(-height // side) * side, -(-width // side) * side
    places = list(itertools.product(range(padded[0]), range(padded[1])))
    zeros = x.new_zeros(batch, DIM)
    full = torch.stack([x[:, r * width + c] if r < height and c < width else zeros for r, c in places], 1)
    q, k, v = layer.qkv(full).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def rolled(place: tuple[int, int]) -> tuple[int, int]:
        return (place[0] - shift) % padded[0], (place[1] - shift) % padded[1]

    bias = x.new_full((HEADS, len(places), len(places)), -torch.inf)
    for (i, query), (j, key) in itertools.product(enumerate(places), repeat=2):
        (r, c), (r2, c2) = rolled(query), rolled(key)
        if (r // side, c // side) == (r2 // side, c2 // side):
            entry = (r - r2 + side - 1) * (2 * side - 1) + (c - c2 + side - 1)
            neighbours = (query[0] - key[0], query[1] - key[1]) == (r - r2, c - c2)
            bias[:, i, j] = layer.relative_position_bias_table[entry] - (0 if neighbours else 100)
    weights = (q @ k.mT * (DIM // HEADS) ** -0.5 + bias).softmax(-1)
    out = layer.proj((weights @ v).transpose(1, 2).flatten(2))
    return torch.stack([out[:, r * padded[1] + c] for r, c in itertools.product(range(height), range(width))], 1)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("size", "window"), [((8, 12), 4), ((7, 9), 4), ((5, 11), 3)])
def test_equals_definition_on_a_padded_map(size: tuple[int, int], window: int, shifted: bool) -> None:
    layer = window_attention(size, window=window, shifted=shifted)
    x = tokens(*size, grad=True)
    want = naive(layer, x, size, window, window // 2 if shifted else 0)
    assert_same_gradients(layer(x, Grid(size)), want, [x, *layer.parameters()], 1e-10)


def test_a_mechanism_with_its_own_heads_has_a_bias_for_each_of_them() -> None:
    layer = window_attention((7, 9), window=4, shifted=True, attention=f"{__name__}:TwoHeads")
    assert layer.relative_position_bias_table.shape == (49, 2)
    x = tokens(7, 9)
    before = layer(x, Grid((7, 9)))
    with torch.no_grad():
        layer.relative_position_bias_table[:, 1] += randn(49)
    moved = torch.linalg.lstsq(layer.proj.weight, (layer(x, Grid((7, 9))) - before).flatten(0, 1).T).solution
    assert moved[:4].abs().max() < 1e-12 < 1e-3 < moved[4:].abs().max()  # of the two heads' channels


@pytest.mark.parametrize(("window", "shifted"), [(None, False), (2, False), (2, True)])
@pytest.mark.parametrize("attention", ["softmax", "tests.layers.test_attention_layer:Surrounded"])
def test_dilated_windows_are_windows_of_every_phase(window: int | None, shifted: bool, attention: str) -> None:
    """Each phase of the map is a map of its own; stem and gate are the whole map's."""
    size, phases = (7, 10), 2
    layer = window_attention(size, window=window, shifted=shifted, dilation=phases, attention=attention)
    x = tokens(*size, grad=True)
    plane = (x if layer.stem is None else layer.stem(x, Grid(size))).unflatten(1, size)
    plane = nn.functional.pad(plane, (0, 0, 0, 2 if window else 0, 0, 1))  # 8 x 10, or whole windows of 2 x 2 phases
    whole = plane.new_zeros(plane.shape)
    single = window_attention((4, 5), window=window, shifted=shifted, attention=attention)
    single.load_state_dict(layer.state_dict())
    for i, j in itertools.product(range(phases), repeat=2):
        phase = plane[:, i::phases, j::phases]
        windows = single.windows((phase.shape[1], phase.shape[2]))
        mask = single.mask(windows, len(x))
        mixed = single.mix(windows.partition(phase.flatten(1, 2)), Grid(windows.window), mask)
        whole[:, i::phases, j::phases] = windows.reverse(mixed).unflatten(1, phase.shape[1:3])
    want = layer.project(whole[:, : size[0], : size[1]].flatten(1, 2), x)
    assert_near(layer(x, Grid(size)), want, 1e-12)
    assert sorted(layer.layout(size).flatten().tolist())[-70:] == list(range(70))


def test_follows_another_map() -> None:
    """The nominal map matters for parameters of fixed length only."""
    layer = window_attention((8, 8), window=4, shifted=True)
    for size in [(12, 8), (9, 14), (5, 6)]:
        x = tokens(*size)
        assert_near(layer(x, Grid(size)), naive(layer, x, size, 4, 2), 1e-10)


@pytest.mark.parametrize("size", [(4, 4), (4, 9), (10, 4)], ids=str)
def test_map_no_larger_than_the_window_is_not_shifted(size: tuple[int, int]) -> None:
    """One side decides, as in the reference."""
    shifted, plain = (window_attention((8, 8), window=4, shifted=shifted) for shifted in (True, False))
    x = tokens(*size)
    assert torch.equal(shifted(x, Grid(size)), plain(x, Grid(size)))
    assert_near(plain(x, Grid(size)), naive(plain, x, size, 4, 0), 1e-10)


@pytest.mark.parametrize(("size", "side"), [((3, 3), 3), ((3, 8), 3), ((7, 2), 2), ((1, 5), 1)], ids=str)
def test_map_smaller_than_the_window_has_smaller_windows(size: tuple[int, int], side: int) -> None:
    """As if the layer had been built for this map, with the table that official fine-tuning would make."""
    layer = window_attention((8, 8), window=4, shifted=True)
    small = window_attention(size, window=4, shifted=True)
    assert small.window == (side, side)
    table = bicubic(layer.relative_position_bias_table, (7, 7), (2 * side - 1, 2 * side - 1))
    small.load_state_dict({**layer.state_dict(), "relative_position_bias_table": table})
    x = tokens(*size)
    assert_near(layer(x, Grid(size)), small(x, Grid(size)), 1e-12)
    assert_near(small(x, Grid(size)), naive(small, x, size, side, 0), 1e-10)


# The whole map as one window


@pytest.mark.parametrize("size", [(4, 6), (5, 3)], ids=str)
@pytest.mark.parametrize("attention", ["focused", "poly_nl", "soft"])
def test_whole_map_is_the_plain_layer(attention: str, size: tuple[int, int]) -> None:
    """No padding and no shift at any size; the grid is the map."""
    layer = window_attention((4, 6), window=None, shifted=True, attention=attention)
    plain = AttentionLayer(DIM, HEADS, Grid((4, 6)), attention=attention).double().eval()
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(tokens(*size), Grid(size)), plain(tokens(*size), Grid(size)))


def test_whole_map_with_softmax_has_a_bias_that_follows_the_map() -> None:
    layer = window_attention((3, 4), window=None)
    assert layer.relative_position_bias_table.shape == (5 * 7, HEADS)
    x = tokens(5, 3)
    bias = relative_position_bias(layer.relative_position_bias_table, (3, 4), (5, 3))
    plain = AttentionLayer(DIM, HEADS, Grid((3, 4))).double().eval()
    plain.load_state_dict({name: t for name, t in layer.state_dict().items() if "table" not in name})
    assert_near(layer(x, Grid((5, 3))), plain(x, Grid((5, 3)), bias[None]), 1e-14)


# Options


@pytest.mark.parametrize("shifted", [False, True])
def test_without_positions_there_is_no_table_and_still_a_mask(shifted: bool) -> None:
    layer, zero = (window_attention((7, 9), window=4, shifted=shifted, rel_pos_bias=wanted) for wanted in (False, True))
    assert "relative_position_bias_table" not in layer.state_dict()
    zero.load_state_dict({**layer.state_dict(), "relative_position_bias_table": torch.zeros(49, HEADS)})
    x = tokens(7, 9, grad=True)
    want = naive(zero, x, (7, 9), 4, 2 if shifted else 0)
    assert_same_gradients(layer(x, Grid((7, 9))), want, [x], 1e-10)


# Mechanisms


def test_mechanism_that_takes_no_bias_has_neither_table_nor_mask() -> None:
    """A shifted block mixes tokens of opposite borders."""
    layer = window_attention((6, 6), window=3, shifted=True, attention="linear")
    assert {name for name, _ in layer.named_parameters()} == {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}
    x = tokens(6, 6)
    plane = x.view(2, 6, 6, DIM).roll((-1, -1), (1, 2))
    corner = AttentionLayer.forward(layer, plane[:, 3:, 3:].flatten(1, 2), Grid((3, 3)))
    assert_near(layer(x, Grid((6, 6)))[:, 0], corner[:, -1], 1e-12)  # the first token, among those of all corners


@pytest.mark.parametrize("window", [0, -7])
def test_window_without_tokens_is_refused(window: int) -> None:
    with pytest.raises(UserError, match=f"at least 1, such as 7, or null .* got {window}"):
        WindowAttention(DIM, HEADS, Grid((8, 8)), window=window)
