"""The host: what it projects and hands to a mechanism, whatever the mechanism declares; its errors."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import Attention, AttentionLayer, Grid, Host, UserError
from tests.helpers import assert_near, assert_same_gradients, perturb, randn

GRID = Grid((4, 6), num_prefix=1)


class Seen(Attention):
    """Answers with the mean of the values and remembers nothing; tests read what it got through `got`."""

    got: dict[str, Tensor]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, **extra: Tensor) -> Tensor:
        type(self).got = {"q": q, "k": k, "v": v, "grid": grid, **extra}
        return v.mean(-2, keepdim=True).expand(*q.shape[:3], -1)


class SharedKey(Seen):
    host = Host(project="qv")


class InputQuery(Seen):
    host = Host(project="kv")


class Gated(Seen):
    host = Host(input=True)


class Wider(Seen):
    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.out_dim = 2 * dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return torch.cat([super().forward(q, k, v, grid)] * 2, dim=-1)


class Surrounded(Seen):
    """All that a mechanism may ask of its host before and after it."""

    host = Host(project="qk", stem="conv_silu", norm="ln", gate="silu")


class GatedTwiceAsWide(Wider):
    host = Host(gate="linear")


class OwnHeads(Seen):
    """Two heads of 5 channels, with keys of 3, whatever the host has; BatchNorm behind the projection."""

    host = Host(norm="bn2d")

    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(10, 2, grid, key_dim=3)


def layer_of(kind: type[Attention], **options: object) -> AttentionLayer:
    return perturb(AttentionLayer(24, 3, GRID, attention=f"{__name__}:{kind.__name__}", **options).double())


def heads(x: Tensor) -> Tensor:
    """Channel c belongs to head c // d."""
    return torch.stack(x.chunk(3, dim=-1), dim=1)


@pytest.mark.parametrize("key_dim", [None, 4])
@pytest.mark.parametrize(
    ("kind", "projected"), [(Seen, "qkv"), (SharedKey, "qv"), (InputQuery, "kv"), (Gated, "qkv"), (Wider, "qkv")]
)
def test_projections_are_those_the_mechanism_declares(
    kind: type[Attention], projected: str, key_dim: int | None
) -> None:
    layer = layer_of(kind, key_dim=key_dim)
    x = randn(2, GRID.num_queries, 24)
    out = layer(x, GRID)
    width = 24 if key_dim is None else 3 * key_dim
    parts = (x @ layer.qkv.weight.T + layer.qkv.bias).split([width if p in "qk" else 24 for p in projected], dim=-1)
    tensors = dict(zip(projected, parts, strict=True))
    q = tensors.get("q", x)
    want = {"q": q, "k": tensors.get("k", q), "v": tensors["v"]}
    for name, tensor in want.items():
        assert_near(kind.got[name], heads(tensor), 1e-14)
    assert kind.got["grid"] == GRID
    assert ("x" in kind.got) == kind.host.input
    if kind.host.input:
        assert kind.got["x"] is x

    mean = tensors["v"].mean(1, keepdim=True).expand(2, GRID.num_queries, 24)
    if kind is Wider:
        mean = torch.cat([part for chunk in mean.chunk(3, -1) for part in (chunk, chunk)], dim=-1)
    assert out.shape == x.shape
    assert_near(out, mean @ layer.proj.weight.T + layer.proj.bias, 1e-13)


@pytest.mark.parametrize("reduction", [{}, {"sr_ratio": 2}, {"sr_pool": 3}])
def test_a_mechanism_may_choose_its_own_heads_and_a_norm_behind_the_projection(reduction: dict[str, int]) -> None:
    layer = layer_of(OwnHeads, **reduction)
    x = randn(2, GRID.num_queries, 24)
    out = layer(x, GRID)
    keys = GRID.num_queries if not reduction else 7 if "sr_ratio" in reduction else 10
    assert [tuple(OwnHeads.got[name].shape[1:]) for name in "qkv"] == [(2, 25, 3), (2, keys, 3), (2, keys, 5)]
    mean = OwnHeads.got["v"].mean(2).flatten(1)
    projected = (mean @ layer.proj.weight.T)[:, None].expand(-1, GRID.num_queries, -1)
    centred = projected - projected.mean((0, 1))
    want = centred / (centred.square().mean((0, 1)) + 1e-5).sqrt() * layer.proj.norm.weight + layer.proj.norm.bias
    assert_near(out, want, 1e-12)
    assert "proj.bias" not in layer.state_dict()


def test_stem_norm_and_gate_surround_a_mechanism() -> None:
    """The values are what the stem makes of the input; the gate reads the input itself, and no prefix is convolved."""
    layer = layer_of(Surrounded)
    x = randn(2, GRID.num_queries, 24, grad=True)
    stem, kernels = layer.stem.in_proj, layer.stem.conv
    inner = F.linear(x, stem.weight, stem.bias)
    plane = inner[:, 1:].mT.unflatten(2, GRID.size)
    local = F.conv2d(plane, kernels.weight, kernels.bias, padding=1, groups=24).flatten(2).mT
    inner = torch.cat([inner[:, :1], local], 1)
    inner = inner * inner.sigmoid()
    mixed = inner.mean(1, keepdim=True).expand_as(x)
    centred = mixed - mixed.mean(-1, keepdim=True)
    mixed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    mixed = mixed * layer.out_norm.weight + layer.out_norm.bias
    gate = F.linear(x, layer.gate.weight, layer.gate.bias)
    want = F.linear(mixed * gate * gate.sigmoid(), layer.proj.weight, layer.proj.bias)
    out = layer(x, GRID)
    q, k = F.linear(inner, layer.qkv.weight, layer.qkv.bias).chunk(2, -1)
    for name, tensor in {"q": q, "k": k, "v": inner}.items():
        assert_near(Surrounded.got[name], heads(tensor), 1e-13)
    used = [p for name, p in layer.named_parameters() if not name.startswith("qkv")]  # the mean asks no weights
    assert_same_gradients(out, want, [x, *used], 1e-10)


@pytest.mark.parametrize("reduction", [{}, {"sr_ratio": 2}])
def test_a_gate_is_as_wide_as_the_output(reduction: dict[str, int]) -> None:
    layer = layer_of(GatedTwiceAsWide, **reduction)
    plain = layer_of(Wider, **reduction)
    plain.load_state_dict({name: t for name, t in layer.state_dict().items() if not name.startswith("gate")})
    x = randn(2, GRID.num_queries, 24)
    assert layer.gate.weight.shape == (48, 24)
    mixed = plain.mix(x, GRID)
    want = F.linear(mixed * F.linear(x, layer.gate.weight, layer.gate.bias), layer.proj.weight, layer.proj.bias)
    assert_near(layer(x, GRID), want, 1e-13)
    layer.gate.init_open()
    assert_near(layer(x, GRID), plain(x, GRID), 1e-13)


def test_a_gate_of_silu_opens() -> None:
    gate = layer_of(Surrounded).gate
    gate.init_open()
    out = randn(2, 5, 24)
    assert_near(gate(out, randn(2, 5, 24, seed=1)), out, 1e-14)


@pytest.mark.parametrize("reduction", [{"sr_ratio": 2}, {"sr_pool": 3}])
def test_reduction_gives_fewer_keys_and_tells_the_mechanism(reduction: dict[str, int]) -> None:
    layer = layer_of(Seen, key_dim=4, **reduction)
    x = randn(2, GRID.num_queries, 24)
    layer(x, GRID)
    kv_size = (2, 3) if "sr_ratio" in reduction else (3, 3)
    assert layer.mechanism.grid == Seen.got["grid"] == Grid((4, 6), kv_size, 1)
    reduced = layer.sr(x, GRID)
    assert_near(Seen.got["q"], heads(x @ layer.q.weight.T + layer.q.bias), 1e-14)
    k, v = (reduced @ layer.kv.weight.T + layer.kv.bias).split([12, 24], dim=-1)
    assert_near(Seen.got["k"], heads(k), 1e-14)
    assert_near(Seen.got["v"], heads(v), 1e-14)


def test_bias_reaches_a_mechanism_that_takes_one() -> None:
    layer = AttentionLayer(24, 3, GRID).double()
    x = randn(2, GRID.num_queries, 24)
    bias = torch.zeros(1, 3, GRID.num_queries, GRID.num_keys, dtype=x.dtype)
    assert_near(layer(x, GRID, bias=bias), layer(x, GRID), 1e-14)
    bias[..., 1:] = -torch.inf  # every query sees the first token only
    seen = layer(x, GRID, bias=bias)
    assert_near(seen, seen[:, :1].expand_as(seen), 1e-13)


def test_projections_without_bias() -> None:
    layer = AttentionLayer(24, 3, GRID, qkv_bias=False, proj_bias=False)
    assert layer.qkv.bias is None
    assert layer.proj.bias is None
    reduced = AttentionLayer(24, 3, GRID, qkv_bias=False, sr_ratio=2)
    assert reduced.q.bias is None
    assert reduced.kv.bias is None


def test_output_is_dropped_in_training_only() -> None:
    layer = AttentionLayer(24, 3, GRID, proj_drop=0.5)
    x = torch.randn(2, GRID.num_queries, 24)
    assert 0.3 < (layer(x, GRID) == 0).float().mean() < 0.7
    assert (layer.eval()(x, GRID) != 0).all()


def test_layer_adds_a_bias_of_relative_positions() -> None:
    """Entry by entry: of two patches that of their offset, of the prefix none; besides a bias of the call."""
    layer = perturb(AttentionLayer(24, 3, GRID, rel_pos_bias=True).double())
    plain = AttentionLayer(24, 3, GRID).double()
    state = layer.state_dict()
    table = state.pop("relative_position_bias_table")
    assert table.shape == (7 * 11, 3)
    plain.load_state_dict(state)
    bias = torch.zeros(3, GRID.num_queries, GRID.num_keys, dtype=torch.float64)
    for i, j in itertools.product(range(24), repeat=2):
        bias[:, 1 + i, 1 + j] = table[(i // 6 - j // 6 + 3) * 11 + i % 6 - j % 6 + 5]
    x, given = randn(2, GRID.num_queries, 24), randn(2, 3, GRID.num_queries, GRID.num_keys, seed=1)
    assert_near(layer(x, GRID), plain(x, GRID, bias[None]), 1e-13)
    assert_near(layer(x, GRID, given), plain(x, GRID, bias + given), 1e-13)


def test_relative_positions_follow_another_grid() -> None:
    layer = perturb(AttentionLayer(24, 3, GRID, rel_pos_bias=True).double())
    grid = Grid((5, 3), num_prefix=1)
    plane = layer.relative_position_bias_table.T.unflatten(1, (7, 11))[None]
    resized = F.interpolate(plane, size=(9, 5), mode="bicubic")[0].flatten(1).T
    twin = AttentionLayer(24, 3, grid, rel_pos_bias=True).double()
    twin.load_state_dict({**layer.state_dict(), "relative_position_bias_table": resized})
    x = randn(2, grid.num_queries, 24)
    assert_near(layer(x, grid), twin(x, grid), 1e-12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention": "linear"}, "LinearAttention, sr_ratio=1 and sr_pool=0"),
        ({"sr_ratio": 2}, "SoftmaxAttention, sr_ratio=2 and sr_pool=0"),
        ({"sr_pool": 3}, "SoftmaxAttention, sr_ratio=1 and sr_pool=3"),
    ],
    ids=str,
)
def test_relative_positions_where_they_have_no_place_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=f"rel_pos_bias is for a mechanism that takes a bias.*; got {said}. Leave it"):
        AttentionLayer(24, 3, GRID, rel_pos_bias=True, **options)


@pytest.mark.parametrize("rate", [-0.1, float("nan"), True], ids=str)
def test_dropout_that_is_no_rate_is_refused(rate: object) -> None:
    with pytest.raises(UserError, match=f"proj_drop must be a number at least 0 and at most 1; got {rate!r}"):
        AttentionLayer(24, 3, GRID, proj_drop=rate)


def test_bias_for_a_mechanism_that_takes_none_is_refused() -> None:
    layer = AttentionLayer(24, 3, GRID, attention="linear")
    with pytest.raises(UserError, match=r"LinearAttention takes no position bias \(accepts_bias is False\)"):
        layer(torch.randn(1, GRID.num_queries, 24), GRID, bias=torch.zeros(1, 3, 25, 25))


def test_two_reductions_at_once_are_refused() -> None:
    with pytest.raises(UserError, match="sr_ratio=2 and sr_pool=7 exclude each other"):
        AttentionLayer(24, 3, GRID, sr_ratio=2, sr_pool=7)


@pytest.mark.parametrize("kind", [SharedKey, InputQuery, Surrounded])
def test_reduction_of_shared_projections_is_refused(kind: type[Attention]) -> None:
    with pytest.raises(UserError, match=f"{kind.__name__} projects '{kind.host.project}'"):
        layer_of(kind, sr_ratio=2)


def test_token_count_that_is_not_the_grids_is_refused() -> None:
    layer = AttentionLayer(24, 3, GRID)
    with pytest.raises(UserError, match="got 24 tokens for a grid of 4x6 patches and 1 prefix tokens = 25"):
        layer(torch.randn(1, 24, 24), GRID)
