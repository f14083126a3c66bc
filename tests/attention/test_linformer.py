"""Linformer equals the two reference implementations, and, option by option, the formula written out naively."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import AttentionLayer, Grid, UserError
from linvit.attention.linformer import LinformerAttention
from linvit.backbones.initialise import tie_mechanisms
from tests.attention.test_focused import cubic_resize
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, randn

GRID = Grid((3, 5), kv_size=(2, 3), num_prefix=1)


# The reference implementations


@both_precisions
@of_case("linformer")
def test_equals_lucidrains(golden: Golden, dtype: torch.dtype) -> None:
    """`share_kv` also makes the keys the values, and shorter sequences take the first columns."""
    (x,) = given = golden.inputs(dtype)
    official = golden.constructor
    heads, shared = official["heads"], official.get("share_kv", False)
    p = {name: t.to(dtype, copy=True).requires_grad_() for name, t in golden.parameters().items()}
    module = LinformerAttention(
        official["dim"],
        heads,
        Grid((1, official["seq_len"])),
        k=official["k"],
        share_kv_weights=shared,
        one_kv_head=official.get("one_kv_head", False),
        resize="slice",
    ).to(dtype)
    module.load_state_dict({name: t.detach().mT[None] for name, t in p.items() if name.startswith("proj")})  # (1, k, M)

    def split(tokens: Tensor) -> Tensor:  # (B, N, h*d) -> (B, h, N, d)
        return tokens.unflatten(2, (-1, official["dim"] // heads)).transpose(1, 2)

    k = split(x @ p["to_k.weight"].T)
    v = k if shared else split(x @ p["to_v.weight"].T)
    out = module(split(x @ p["to_q.weight"].T), k, v, Grid((1, x.shape[1])))
    golden.check_call(F.linear(out.transpose(1, 2).flatten(2), p["to_out.weight"], p["to_out.bias"]), given)
    for name in golden.named("grad_param."):
        own = name.removeprefix("grad_param.")
        got = module.get_parameter(own).grad[0].mT if own.startswith("proj") else p[own].grad
        golden.check(name, got)


@both_precisions
@of_case("lra_linformer")
def test_equals_nystromformers_linformer(golden: Golden, dtype: torch.dtype) -> None:
    *given, mask = golden.inputs(dtype)
    q, k, v = given
    config = golden.constructor["config"]
    grid = Grid((1, config["max_seq_len"]))
    module = LinformerAttention(
        config["head_dim"] * config["num_head"],
        config["num_head"],
        grid,
        k=config["linformer_k"],
        share="none",
        share_kv_weights=True,
    ).to(dtype)
    module.load_state_dict({"proj_k": golden.parameters()["E"]})
    kept = mask.detach()[:, None, :, None]
    out = module(q, k * kept, v * kept, grid)
    golden.check_qkv(out, given)
    golden.check("grad_param.E", module.proj_k.grad)


# The formula


def naive(module: LinformerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`softmax(q (E k)^T / sqrt(dk)) (F v)`, one head and one query at a time."""
    e = module.proj_k
    f = e if module.proj_v is None else module.proj_v
    heads = []
    for h in range(module.num_heads):
        source = 0 if module.one_kv_head else h
        own = h if len(e) > 1 else 0
        keys = (e[own][None, :, :, None] * k[:, source, None]).sum(2)  # (B, k, dk)
        values = (f[own][None, :, :, None] * v[:, source, None]).sum(2)  # (B, k, d)
        rows = []
        for n in range(q.shape[2]):
            weights = torch.exp((q[:, h, n, None] * keys).sum(-1) / module.key_dim**0.5)  # (B, k)
            rows.append((weights[..., None] * values).sum(1) / weights.sum(-1, keepdim=True))
        heads.append(torch.stack(rows, dim=1))
    return torch.stack(heads, dim=1)


OPTIONS = [
    {},
    {"k": 3},
    {"share": "kv", "k": 3},
    {"share": "layerwise", "k": 3},
    {"share": "none", "k": 3},
    {"share_kv_weights": True, "k": 3},
    {"share": "none", "share_kv_weights": True, "k": 3},
    {"one_kv_head": True, "k": 3},
    {"share": "none", "one_kv_head": True, "k": 3},
    {"init": "normal002"},
    {"resize": "slice"},
    {"attn_drop": 0.5},  # no effect in evaluation
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_formula(options: dict[str, object]) -> None:
    module = mechanism({"name": "linformer", **options}, GRID)
    given = inputs(module, GRID, grad=True)
    want = naive(module, given.q, given.k, given.v)
    assert_same_gradients(given(module, GRID), want, [*given.tensors, *module.parameters()], 1e-10)


@pytest.mark.parametrize("grid", [Grid((7, 9), num_prefix=2), Grid((1, 50))], ids=str)
def test_equals_formula_on_any_grid(grid: Grid) -> None:
    module = mechanism({"name": "linformer", "k": 5}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-10)


def test_equals_formula_with_narrow_keys() -> None:
    module = mechanism("linformer", GRID, key_dim=3)
    given = inputs(module, GRID)
    assert_near(given(module, GRID), naive(module, given.q, given.k, given.v), 1e-12)


def test_one_head_may_come_alone() -> None:
    module = mechanism({"name": "linformer", "one_kv_head": True, "k": 3}, GRID)
    q, k, v, _ = inputs(module, GRID)
    assert torch.equal(module(q, k[:, :1], v[:, :1], GRID), module(q, k, v, GRID))


def test_dropout_acts_in_training_only_and_keeps_the_mean() -> None:
    module = mechanism({"name": "linformer", "attn_drop": 0.5}, GRID)
    given = inputs(module, GRID, batch=1)
    calm = given(module, GRID)
    noisy = given.map(lambda x: x.expand(2000, -1, -1, -1))(module.train(), GRID)
    assert noisy.std(0).min() > 0
    assert_near(noisy.mean(0, keepdim=True), calm, 0.1)


# Other grids


@pytest.mark.parametrize("grid", [Grid((4, 3), num_prefix=2), Grid((8, 12), (4, 6), num_prefix=1)], ids=str)
def test_matrices_follow_another_grid(grid: Grid) -> None:
    """As if built for that grid with the resized matrices: patches bicubic in 2-D and rescaled, prefix columns kept."""
    nominal = Grid((5, 6), num_prefix=grid.num_prefix)
    module, resized = (mechanism({"name": "linformer", "k": 4}, g, dim=8, num_heads=2) for g in (nominal, grid))
    rows, columns = (cubic_resize(new, old) for new, old in zip(grid.keys_size, nominal.size, strict=True))
    table = torch.kron(rows, columns)  # (patches of the call, 30)
    prefix = grid.num_prefix
    state = {
        name: torch.cat([t[..., :prefix], t[..., prefix:] @ table.T * 30 / len(table)], dim=-1)
        for name, t in module.state_dict().items()
    }
    resized.load_state_dict(state)
    given = inputs(module, grid)
    assert_near(given(module, grid), given(resized, grid), 1e-6)
    left, right = module.factors(given.q, given.k, grid)
    assert_near(left @ right.mT @ given.v, given(resized, grid), 1e-6)


def test_finer_grid_of_the_same_image_gives_the_same_sums() -> None:
    """The mean of smooth tokens must not change with the resolution: E = F = 1 / M."""
    module = mechanism({"name": "linformer", "k": 1}, Grid((4, 4)), dim=4, num_heads=2)
    with torch.no_grad():
        for matrix in module.parameters():
            matrix.fill_(1 / 16)
    for size in ((4, 4), (8, 8), (3, 5)):
        given = inputs(module, Grid(size))
        assert_near(given(module, Grid(size)), given.v.mean(2, keepdim=True).expand_as(given.v), 1e-6)


def test_slice_takes_the_first_columns() -> None:
    nominal, grid = Grid((1, 9), num_prefix=1), Grid((1, 5), num_prefix=1)
    module, resized = (mechanism({"name": "linformer", "k": 4, "resize": "slice"}, g) for g in (nominal, grid))
    resized.load_state_dict({name: t[..., :6] for name, t in module.state_dict().items()})
    given = inputs(module, grid)
    assert torch.equal(given(module, grid), given(resized, grid))


# One matrix for all layers

LAYERWISE = {"name": "linformer", "share": "layerwise", "k": 3}


def test_layers_share_one_matrix_and_add_their_gradients() -> None:
    grid = Grid((3, 4))
    layers = torch.nn.ModuleList(AttentionLayer(8, 2, grid, attention=LAYERWISE) for _ in range(3))
    before = sum(p.numel() for p in layers.parameters())
    tie_mechanisms(layers)
    assert all(layer.mechanism.proj_k is layers[0].mechanism.proj_k for layer in layers)
    assert before - sum(p.numel() for p in layers.parameters()) == 2 * 3 * 12
    x = randn(2, 12, 8, dtype=torch.float32)
    sum(layer(x, grid).sum() for layer in layers).backward()
    together = layers[0].mechanism.proj_k.grad.clone()
    alone = []
    for layer in layers:
        layers.zero_grad()
        layer(x, grid).sum().backward()
        alone.append(layer.mechanism.proj_k.grad.clone())
    assert_near(together, sum(alone), 1e-5)


@pytest.mark.parametrize(
    ("other", "grid", "tied"),
    [
        ({}, GRID, True),
        ({"attn_drop": 0.1, "one_kv_head": True}, GRID, True),  # of the layer's own, and no matter of the matrix
        ({"k": 4}, GRID, False),
        ({"share": "kv"}, GRID, False),
        ({}, GRID._replace(size=(3, 6)), False),
        ({}, GRID._replace(kv_size=(3, 2)), False),  # as many keys, which lie elsewhere
    ],
    ids=str,
)
def test_only_layers_of_the_same_matrix_share_it(other: dict[str, object], grid: Grid, tied: bool) -> None:
    first, second = mechanism(LAYERWISE, GRID), mechanism({**LAYERWISE, **other}, grid)
    second.tie([mechanism("softmax", GRID), mechanism({"name": "linformer", "k": 3}, GRID), first])
    assert (second.proj_k is first.proj_k) == tied


def test_only_layers_of_the_same_width_share_a_matrix() -> None:
    first, second = (mechanism(LAYERWISE, GRID, dim=dim) for dim in (24, 48))
    second.tie([first])
    assert second.proj_k is not first.proj_k


# Initial values and errors


@pytest.mark.parametrize(("init", "std"), [("uniform", 16**-0.5 / 3**0.5), ("normal002", 0.02)])
def test_matrices_begin_as_in_the_references(init: str, std: float) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = LinformerAttention(32, 4, Grid((10, 20), num_prefix=1), k=16, share="none", init=init)
    for matrix in (module.proj_k, module.proj_v):
        assert matrix.shape == (4, 16, 201)
        assert matrix.std().item() == pytest.approx(std, rel=0.05)
        if init == "uniform":
            assert matrix.abs().max() <= 0.25
    assert LinformerAttention(32, 4, Grid((4, 4))).proj_k.shape == (1, 16, 16)  # k capped


@pytest.mark.parametrize(
    ("resize", "grid", "message"),
    [
        ("interpolate", Grid((4, 4)), r"4x4 patches and 1 prefix tokens, got 4x4 and 0; build it with num_prefix=0"),
        ("slice", Grid((4, 5), num_prefix=1), r"got 4x5 and 1; resize='slice' cannot grow, use resize='interpolate'"),
    ],
)
def test_grid_that_cannot_be_followed_is_refused(resize: str, grid: Grid, message: str) -> None:
    module = mechanism({"name": "linformer", "resize": resize}, Grid((4, 4), num_prefix=1))
    with pytest.raises(UserError, match=message):
        inputs(module, grid)(module, grid)
