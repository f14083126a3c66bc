"""Local and linear attention in one layer, decays and delta rules: their references, and the formulas written out."""

import io
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit import Attention, AttentionLayer, Grid, UserError, create_attention
from linvit.analysis import attention_matrix
from linvit.attention import delta, lion
from linvit.attention.ops.local import Neighbourhoods, Windows
from linvit.layers.block import Block
from linvit.layers.mlp import feed_forward
from linvit.layers.windows import WindowAttention
from linvit.testing.backbone.images import BackboneSubject
from linvit.testing.compile import exports, onnx
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, randn

# The references


def built(golden: Golden, spec: str, dtype: torch.dtype, names: Mapping[str, str], **options: Any) -> Attention:
    """Our mechanism of the size of a file, with its parameters: `names` has ours by theirs."""
    size = golden.constructor["dim"], golden.constructor.get("num_heads", golden.constructor.get("heads"))
    module = create_attention({"name": spec, **options}, dim=size[0], num_heads=size[1], grid=grid_of(golden)).to(dtype)
    state = module.state_dict()
    for theirs, ours in names.items():
        state[ours] = golden.tensors[f"param.{theirs}"].view_as(state[ours])
    module.load_state_dict(state)
    return module.eval()


def grid_of(golden: Golden) -> Grid:
    kwargs = golden.kwargs
    return Grid((kwargs["H"], kwargs["W"]), num_prefix=kwargs.get("num_prefix", 0))


def check_named(golden: Golden, module: nn.Module, names: Mapping[str, str]) -> None:
    """Holds the gradients of all parameters of a file; `names` has ours by theirs."""
    assert {f"grad_param.{name}" for name in names} == {*golden.named("grad_param.")}
    for theirs, ours in names.items():
        grad = module.get_parameter(ours).grad
        golden.check(f"grad_param.{theirs}", grad.view_as(golden.tensors[f"grad_param.{theirs}"]))


@both_precisions
@of_case("sla_window_core")
def test_sla_equals_the_formula(golden: Golden, dtype: torch.dtype) -> None:
    options = golden.meta["options"]
    names = (
        {"alpha": "alpha"}
        if options["combine"] == "alpha"
        else {f"proj_l.{n}": f"proj_l.{n}" for n in ("weight", "bias")}
    )
    module = built(golden, "sla", dtype, names, **options)
    given = golden.inputs(dtype)
    golden.check_call(module(*given, grid_of(golden)), given)
    check_named(golden, module, names)


@both_precisions
@of_case("sla_blocks_core")
def test_sla_selects_the_blocks_of_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    """Of a sequence, which is a grid of one row; their `rest` has no 1e-5 in the denominator."""
    official, options = golden.constructor, dict(golden.meta["options"])
    assert options.pop("select") == "topk"
    blocks = official["BLKQ"], official["BLKK"]
    grid = Grid((1, golden.tensors["input.q"].shape[2]))
    size = {"dim": official["dim"], "num_heads": official["num_heads"], "grid": grid}
    module = create_attention({"name": "sla", "topk": official["topk"], "blocks": blocks, **options}, **size).to(dtype)
    module.load_state_dict(golden.parameters())
    given = golden.inputs(dtype)
    chosen = module.near(*given[:2], grid).others == 0
    assert torch.equal(chosen, golden.tensors["aux.map"] > 0)
    golden.check_call(module(*given, grid), given)
    check_named(golden, module, {name: name for name in golden.parameters()})


@both_precisions
@of_case("lolcats_window_core")
def test_lolcats_equals_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    options = {**golden.meta["options"], "shift": True}
    options["local"] = options.pop("window")
    names = {"window_factors": "window_factors"} | {f"feature_map_{n}.mlp.layer": f"maps.{n}" for n in "qk"}
    module = built(golden, "lolcats", dtype, names, **options)
    given = golden.inputs(dtype)
    golden.check_call(module(*given, grid_of(golden)), given)
    check_named(golden, module, names)


@both_precisions
@of_case("jetvit_core")
def test_jetvit_equals_the_public_code(golden: Golden, dtype: torch.dtype) -> None:
    names = {f"dynamic_conv.mlp.{i}.{n}": f"mlp.{i}.{n}" for i in (0, 2) for n in ("weight", "bias")}
    module = built(golden, "jetvit", dtype, names, kernel_size=golden.constructor["kernel_size"])
    given = golden.inputs(dtype)
    golden.check_call(module(*given, grid_of(golden)), given)
    check_named(golden, module, names)


@both_precisions
@of_case("jetvit")
def test_jetvit_layer_equals_the_public_code(golden: Golden, dtype: torch.dtype) -> None:
    """The norm and the projections, which a host has, are written out; heads may be narrower than C / h."""
    leaves, grid = golden.leaves(dtype), grid_of(golden)
    (x,) = given = golden.inputs(dtype)
    heads, width = golden.constructor["heads"], golden.constructor["heads"] * golden.constructor["dim_head"]
    module = create_attention("jetvit", dim=width, num_heads=heads, grid=grid).to(dtype)
    normed = F.layer_norm(x, x.shape[-1:], leaves["norm.weight"], leaves["norm.bias"])
    q, k, v = (
        each.unflatten(2, (heads, -1)).transpose(1, 2)
        for each in F.linear(normed, leaves["to_qkv.weight"]).chunk(3, -1)
    )
    own = {f"mlp.{i}.{n}": leaves[f"dynamic_conv.mlp.{i}.{n}"] for i in (0, 2) for n in ("weight", "bias")}
    out = torch.func.functional_call(module, own, (q, k, v, grid)).transpose(1, 2).flatten(2)
    golden.check_call(F.linear(out, leaves["to_out.0.weight"], leaves["to_out.0.bias"]), given)
    golden.check_leaves(leaves)


def jetvit_name(name: str) -> str:
    """Our name of a parameter of a layer of JetViT's public code."""
    changed = {"norm": "norm1", "to_qkv": "attn.qkv", "to_out.0": "attn.proj", "dynamic_conv": "attn.mechanism"}
    changed["rel_pos_bias.weight"] = "attn.relative_position_bias_table"
    first = next(theirs for theirs in changed if name.startswith(theirs))
    return changed[first] + name.removeprefix(first)


def jetvit_block(golden: Golden, kind: str, grid: Grid) -> Block:
    """A block of JetViT's public code: linear, in windows (with a bias of positions), or full."""
    official = golden.constructor
    width, hidden = official["dim"], official.get("mlp_dim", 1)
    heads = official.get("heads", width // official["dim_head"])
    options = {"attention": "jetvit" if kind == "LA" else "softmax", "qkv_bias": False}
    layer: AttentionLayer = (
        WindowAttention(width, heads, grid, window=official["window_size"], proj_bias=False, **options)
        if kind == "WA"
        else AttentionLayer(width, heads, grid, **options)
    )
    return Block(width, layer, feed_forward("mlp", width, hidden), 0.0, norm_eps=1e-5)


@both_precisions
@of_case("jetvit_window")
def test_jetvits_windows_equal_the_public_code(golden: Golden, dtype: torch.dtype) -> None:
    """Its layer is the norm and the attention of one of our blocks."""
    grid = grid_of(golden)
    block = jetvit_block(golden, "WA", grid).to(dtype)
    names = {name: jetvit_name(name) for name in golden.parameters()}
    state = {ours: golden.tensors[f"param.{name}"] for name, ours in names.items()}
    block.load_state_dict(state, strict=False)  # the rest of the block has no part
    (x,) = given = golden.inputs(dtype)
    golden.check_call(block.attn(block.norm1(x), grid), given)
    check_named(golden, block, names)


@both_precisions
@of_case("jetvit_backbone")
def test_jetvits_network_equals_the_public_code(golden: Golden, dtype: torch.dtype) -> None:
    """It is our plain network with the norms of its embedding, which normalise pixels, and blocks of three kinds."""
    official = golden.constructor
    side, kinds = official["patch_size"], official["attn_layers"]
    net = linvit.create_backbone(
        "deit_nano",
        attention=[{"LA": "jetvit", "WA": "window", "FA": "softmax"}[kind] for kind in kinds],
        num_classes=official["num_classes"],
        img_size=official["image_size"],
        patch_size=side,
        embed_dim=official["dim"],
        depth=official["depth"],
        num_heads=official["heads"],
    )
    net.blocks = nn.ModuleList(jetvit_block(golden, kind, net.grid) for kind in kinds)
    net.norm.eps = 1e-5

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pixels, width = side**2 * golden.tensors["input"].shape[1], official["dim"]
            self.layers = nn.Sequential(nn.LayerNorm(pixels), nn.Linear(pixels, width), nn.LayerNorm(width))

        def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
            patches = (
                x.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 3, 5, 1)
            )  # (B, H, W, p, p, c)
            return self.layers(patches.flatten(3).flatten(1, 2)), net.grid.size

    net.patch_embed = Embedding()

    def ours(name: str) -> str:
        if (found := re.match(r"transformer\.layers\.(\d+)\.0\.options\.\w+\.(.*)", name)) is not None:
            return f"blocks.{found[1]}.{jetvit_name(found[2])}"
        if (found := re.match(r"transformer\.layers\.(\d+)\.1\.net\.([014])\.(.*)", name)) is not None:
            return f"blocks.{found[1]}.{ {'0': 'norm2', '1': 'mlp.fc1', '4': 'mlp.fc2'}[found[2]] }.{found[3]}"
        if (found := re.match(r"to_patch_embedding\.([123])\.(.*)", name)) is not None:
            return f"patch_embed.layers.{int(found[1]) - 1}.{found[2]}"
        return {"pos_embedding": "pos_embed"}.get(name, name.replace("mlp_head", "head").replace("transformer.", ""))

    names = {name: ours(name) for name in golden.parameters()}
    net = net.to(dtype).eval()
    shapes = net.state_dict()
    net.load_state_dict({own: golden.tensors[f"param.{name}"].view_as(shapes[own]) for name, own in names.items()})
    given = golden.inputs(dtype)
    golden.check_call(net(*given), given)
    check_named(golden, net, names)


@both_precisions
@of_case("vitdet_block")
def test_vitdets_block_equals_detectron2(golden: Golden, dtype: torch.dtype) -> None:
    """In windows the padding takes part, and a map that is smaller than a window is padded to it."""
    official, window = golden.constructor, golden.constructor["window_size"]
    dim, heads, grid = official["dim"], official["num_heads"], Grid(tuple(official["input_size"]))
    positions: Any = "decomposed" if official["use_rel_pos"] else False
    layer: AttentionLayer = (
        WindowAttention(dim, heads, grid, window=window, shrink=False, attention="softmax", rel_pos_bias=positions)
        if window
        else AttentionLayer(dim, heads, grid, attention="softmax", rel_pos_bias=positions)
    )
    block = Block(dim, layer, feed_forward("mlp", dim, int(dim * official["mlp_ratio"])), 0.0, norm_eps=1e-6).to(dtype)
    names = {name: name.replace("rel_pos_", "rel_pos.") for name in golden.parameters()}
    block.load_state_dict({own: golden.tensors[f"param.{name}"] for name, own in names.items()})
    (x,) = given = golden.inputs(dtype)
    golden.check_call(block(x.flatten(1, 2), grid).unflatten(1, grid.size), given)
    check_named(golden, block, names)


@both_precisions
@of_case("gdla_core")
def test_gdla_equals_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    names = {"lambda_scale": "lambda_scale", "ln.weight": "norm"}
    module = built(golden, "gdla", dtype, names)
    given = golden.inputs(dtype)
    golden.check_call(module.mixed(*given), given)
    check_named(golden, module, names)


@both_precisions
@of_case("gdla")
def test_gdla_layer_equals_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    """Two of our cores around their convolutions."""
    leaves, grid = golden.leaves(dtype), grid_of(golden)
    (x,) = given = golden.inputs(dtype)
    dim, heads = golden.constructor["dim"], golden.constructor["n_heads"]

    def core(z: Tensor, scale: Tensor) -> Tensor:
        q, k, v, gate = (each.unflatten(2, (heads, -1)).transpose(1, 2) for each in z.chunk(4, -1))
        module = create_attention("gdla", dim=dim, num_heads=heads, grid=grid)
        del module.lambda_scale, module.norm
        module.lambda_scale, module.norm = scale, leaves["ln.weight"]  # leaves of the file
        return module.mixed(q, k, v, gate).transpose(1, 2).flatten(2)

    z = F.linear(x, leaves["qkvg.weight"], leaves.get("qkvg.bias"))
    main = core(z, leaves["lambda_scale_main"])
    plane = F.conv2d(grid.plane(z), leaves["dwc.weight"], leaves["dwc.bias"], padding=1, groups=4 * dim)
    plane = F.conv2d(plane, leaves["pwc.weight"], leaves["pwc.bias"])
    both = torch.cat([main, core(plane.flatten(2).mT, leaves["lambda_scale_aux"])], -1)
    golden.check_call(F.linear(both, leaves["out_proj.weight"], leaves.get("out_proj.bias")), given)
    golden.check_leaves(leaves)


def lion_options(golden: Golden) -> dict[str, str]:
    official = golden.constructor
    return {
        "decay": {"Decay": "fixed", "Selective": "selective"}[official["mask_type"]],
        "order": "S" if official["order"] == "S" else "normal",
    }


@both_precisions
@of_case("lion_core")
def test_lion_equals_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    """LION-LIT is linear attention."""
    given, grid = golden.inputs(dtype), grid_of(golden)
    if golden.constructor["mask_type"] == "Lit":
        width = golden.constructor["dim"] // golden.constructor["num_heads"]
        module = built(golden, "linear", dtype, {}, eps=1e-6 * width**0.5)
        golden.check_call(module(*given, grid), given)
        return
    options = lion_options(golden)
    factors = [*golden.parameters()]
    names = {name: f"factors_of_heads.{place}" for place, name in enumerate(sorted(factors, reverse=True))}
    module = built(golden, "lion", dtype, names, **options)
    if options["decay"] == "fixed":
        golden.check_call(module(*given, grid), given)
        check_named(golden, module, names)
    else:
        golden.check_call(module.mixed(*given[:3], grid, torch.stack([-gate for gate in given[3:]])), given)


@both_precisions
@of_case("lion")
def test_lion_layer_equals_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    """As published, the gate gets no gradient, and the input none through it: a defect, so only outputs are equal."""
    official, grid = golden.constructor, grid_of(golden)
    lit = official["mask_type"] == "Lit"
    width = official["dim"] // official["num_heads"]
    spec = {"name": "linear", "eps": 1e-6 * width**0.5} if lit else {"name": "lion", **lion_options(golden)}
    layer = AttentionLayer(official["dim"], official["num_heads"], grid, attention=spec, qkv_bias=official["qkv_bias"])

    def ours(name: str) -> str:
        module, _, kind = name.partition(".")
        if module not in ("a_i", "a2_i"):
            return name
        place = int(module == "a2_i")
        return f"mechanism.gates.{place}.{kind}" if kind else f"mechanism.factors_of_heads.{place}"

    names = {name: ours(name) for name in golden.parameters()}
    layer = layer.to(dtype)
    shapes = layer.state_dict()
    layer.load_state_dict({ours: golden.tensors[f"param.{name}"].view_as(shapes[ours]) for name, ours in names.items()})
    given = golden.inputs(dtype)
    out = layer(*given, grid)
    if golden.name.endswith("published"):
        golden.check("output", out)
        return
    golden.check_call(out, given)
    for theirs, own in names.items():
        golden.check(f"grad_param.{theirs}", layer.get_parameter(own).grad.view_as(golden.tensors[f"param.{theirs}"]))


@both_precisions
@of_case("delta_core", "gated_delta_core")
def test_delta_rules_equal_flash_linear_attention(golden: Golden, dtype: torch.dtype) -> None:
    given, options = golden.inputs(dtype), golden.meta["options"]
    module = built(golden, "delta", dtype, {}, directions=options["directions"])
    q, k, v, beta, *log = given
    log = log[0] if log else torch.zeros_like(beta)
    if options.get("qk_l2norm", True):
        out = module.directed(q, k, v, beta, log, grid_of(golden))
    else:
        out = module.mixed(q, k, v, beta, log, grid_of(golden))
    golden.check_call(out, given)


@both_precisions
@of_case("gated_delta")
def test_gated_delta_equals_flash_linear_attention(golden: Golden, dtype: torch.dtype) -> None:
    names = {name: name for name in ("a_proj.weight", "b_proj.weight", "A_log", "dt_bias")} | {"o_norm.weight": "norm"}
    module = built(golden, "gated_delta", dtype, names, **golden.meta["options"])
    given = golden.inputs(dtype)
    golden.check_call(module(*given[:3], grid_of(golden), x=given[3]), given)
    check_named(golden, module, names)


# The formulas, with N x N matrices or token by token

GRIDS = [Grid((5, 7), num_prefix=2), Grid((4, 4)), Grid((1, 9), num_prefix=1)]


def near(grid: Grid, size: int, neighbourhood: bool = False) -> Tensor:
    """True where a key (column) is near to a query, (N, N)."""
    height, width = grid.size
    places = [None] * grid.num_prefix + list(itertools.product(range(height), range(width)))

    def is_near(one: Any, other: Any) -> bool:
        if one is None or other is None:
            return True
        if neighbourhood:
            return all(abs(a - b) <= size // 2 for a, b in zip(one, other, strict=True))
        return all(a // size == b // size for a, b in zip(one, other, strict=True))

    return torch.tensor([[is_near(one, other) for other in places] for one in places])


def logits(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / q.shape[-1] ** 0.5


def naive_window(module: Any, given: Any, grid: Grid) -> Tensor:
    return logits(given.q, given.k).masked_fill(~near(grid, module.window_size), -torch.inf).softmax(-1) @ given.v


def selected(module: Any, given: Any, grid: Grid) -> Tensor:
    """True where the block of a key (column) is one that the block of the query selects, (B, h, N, N)."""
    (of_queries, of_keys), tokens, p = module.blocks, grid.num_queries, grid.num_prefix
    starts = range(p, tokens, of_keys)
    close = torch.ones(*given.q.shape[:2], tokens, tokens, dtype=torch.bool)
    close[..., p:, p:] = False
    for image, head, start in itertools.product(*map(range, close.shape[:2]), range(p, tokens, of_queries)):
        query = given.q[image, head, start : start + of_queries].mean(0)
        scores = [float(query @ given.k[image, head, first : first + of_keys].mean(0)) for first in starts]
        order = sorted(range(len(starts)), key=scores.__getitem__, reverse=True)
        for block in order[: max(int(module.topk * len(starts)), 1)]:
            first = starts[block]
            close[image, head, start : start + of_queries, first : first + of_keys] = True
    return close


def naive_sla(module: Any, given: Any, grid: Grid) -> Tensor:
    close = near(grid, module.window_size) if module.topk is None else selected(module, given, grid)
    maps = {"softmax": lambda x: x.softmax(-1), "elu": lambda x: F.elu(x) + 1, "relu": F.relu}
    weights = maps[module.feature_map](given.q) @ maps[module.feature_map](given.k).mT
    if module.linear == "rest":
        weights = weights.masked_fill(close, 0)
    distant = weights @ given.v / (weights.sum(-1, keepdim=True) + 1e-5)
    local = logits(given.q, given.k).masked_fill(~close, -torch.inf).softmax(-1) @ given.v
    if module.proj_l is not None:
        return local + module.proj_l(distant)
    a = module.alpha.sigmoid()[:, None, None]
    if module.linear == "rest":
        a = torch.where(close.all(-1, keepdim=True), 1, a)
    return a * local + (1 - a) * distant


def naive_lolcats(module: Any, given: Any, grid: Grid) -> Tensor:
    close = near(grid, module.window_size, module.near is Neighbourhoods)
    g = module.window_factors.sigmoid()[:, None, None]
    s = logits(given.q, given.k)
    top = s.masked_fill(~close, -torch.inf).amax(-1, keepdim=True) if module.shift else 0
    maps = [x @ module.maps[name] for name, x in (("q", given.q), ("k", given.k))]
    q, k = (torch.cat([y.softmax(-1), (-y).softmax(-1)], -1) for y in maps)
    weights = torch.where(close, g * (s - top).exp(), (1 - g if module.affine else 1) * (q @ k.mT))
    return weights @ given.v / weights.sum(-1, keepdim=True)


def naive_jetvit(module: Any, given: Any, grid: Grid) -> Tensor:
    weights = F.relu(given.q) @ F.relu(given.k).mT
    linear = weights @ given.v / weights.sum(-1, keepdim=True).clamp_min(1e-6)
    batch, heads, _, width = given.v.shape
    patches, side = given.v[:, :, grid.num_prefix :], module.kernel_size
    kernels = module.mlp(patches.mean(2).flatten(1)).view(batch, heads, width, side, side)
    local = torch.zeros_like(patches)
    plane = patches.unflatten(2, grid.size)
    for row, column, i, j in itertools.product(*map(range, grid.size), range(side), range(side)):
        y, x = row + i - side // 2, column + j - side // 2
        if 0 <= y < grid.size[0] and 0 <= x < grid.size[1]:
            seen = kernels[..., i, j] * plane[:, :, y, x]
            local = local.index_add(2, torch.tensor([row * grid.size[1] + column]), seen[:, :, None])
    return linear + F.pad(local, (0, 0, grid.num_prefix, 0))


def naive_gdla(module: Any, given: Any, grid: Grid) -> Tensor:
    parts = []
    for q, k in zip(given.q.chunk(2, -1), given.k.chunk(2, -1), strict=True):
        weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
        parts.append(weights @ given.v / (weights.sum(-1, keepdim=True) + 1e-6))
    y = parts[0] - module.lambda_scale[:, None] * parts[1]
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.norm
    gate = module.gate_proj(given.extra["x"]).unflatten(2, (module.num_heads, -1)).transpose(1, 2)
    return y * gate.sigmoid()


def naive_lion(module: Any, given: Any, grid: Grid) -> Tensor:
    tokens, prefix, (height, width) = grid.num_queries, grid.num_prefix, grid.size
    rows = [range(width) if y % 2 == 0 or module.orders == 1 else range(width - 1, -1, -1) for y in range(height)]
    orders = [[prefix + y * width + x for y in range(height) for x in rows[y]]]
    if module.orders == 2:
        downs = [range(height) if x % 2 == 0 else range(height - 1, -1, -1) for x in range(width)]
        orders.append([prefix + y * width + x for x in range(width) for y in downs[x]])
    mask = torch.zeros(())
    for number, order in enumerate(orders):
        if module.selective:
            a = 1 - module.gates[number](given.extra["x"]).sigmoid().mT  # (B, h, N)
            a = torch.cat([torch.ones_like(a[..., :prefix]), a[..., prefix:]], -1)
        else:
            a = module.factors_of_heads[number].sigmoid()[None, :, None].expand(1, -1, tokens)
        whole = [*range(prefix), *order]
        place = {token: at for at, token in enumerate(whole)}
        entries = [[None] * tokens for _ in range(tokens)]
        for i, j in itertools.product(range(tokens), repeat=2):
            step = 1 if place[j] < place[i] else -1
            between = [whole[at] for at in range(place[j], place[i], step)]
            entries[i][j] = a[..., between].prod(-1)
        mask = mask + torch.stack([torch.stack(row, -1) for row in entries], -2) / module.orders

    def phi(x: Tensor) -> Tensor:
        y = F.silu(x) + 0.5
        return y / y.norm(dim=-1, keepdim=True)

    weights = phi(given.q) @ phi(given.k).mT / given.q.shape[-1] ** 0.5 * mask
    return weights @ given.v / (weights.sum(-1, keepdim=True) + 1e-6)


def naive_delta(module: Any, given: Any, grid: Grid) -> Tensor:
    gated, x = hasattr(module, "a_proj"), given.extra["x"]
    q, k, v = (F.silu(each) if gated else each for each in (given.q, given.k, given.v))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    beta, a = module.b_proj(x).sigmoid().mT, torch.ones_like(module.b_proj(x)).mT
    if gated:
        a = (-module.A_log.exp()[:, None] * F.softplus(module.a_proj(x).mT + module.dt_bias[:, None])).exp()
    tokens, prefix, (height, width) = grid.num_queries, grid.num_prefix, grid.size
    down = [*range(prefix), *(prefix + y * width + x for x in range(width) for y in range(height))]
    orders = [[*range(tokens)], [*range(tokens)][::-1], down, down[::-1]][: module.directions]
    total = torch.zeros_like(v)
    for order in orders:
        state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
        for t in order:
            state = a[:, :, t, None, None] * state
            error = v[:, :, t] - (state.mT @ k[:, :, t, :, None]).squeeze(-1)
            state = state + beta[:, :, t, None, None] * k[:, :, t, :, None] * error[:, :, None]
            read = (state.mT @ q[:, :, t, :, None]).squeeze(-1) / q.shape[-1] ** 0.5
            total = total.index_add(2, torch.tensor([t]), read[:, :, None])
    if gated:
        total = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.norm
    return total


FORMULAS: list[tuple[Callable[[Any, Any, Grid], Tensor], dict[str, Any]]] = [
    (naive_window, {"name": "window", "window_size": 3}),
    (naive_sla, {"name": "sla", "window_size": 3}),
    (naive_sla, {"name": "sla", "window_size": 3, "linear": "all", "feature_map": "elu"}),
    (naive_sla, {"name": "sla", "window_size": 4, "combine": "proj", "feature_map": "relu"}),
    (naive_sla, {"name": "sla", "topk": 0.4, "blocks": [4, 3]}),
    (naive_sla, {"name": "sla", "topk": 0.1, "blocks": [3, 8], "linear": "all", "combine": "proj"}),
    (naive_lolcats, {"name": "lolcats", "window_size": 3}),
    (naive_lolcats, {"name": "lolcats", "window_size": 2, "affine": True, "shift": True, "feature_dim": 5}),
    (naive_lolcats, {"name": "lolcats", "window_size": 3, "local": "neighbourhood"}),
    (naive_jetvit, {"name": "jetvit"}),
    (naive_jetvit, {"name": "jetvit", "kernel_size": 5, "reduction": 3}),
    (naive_gdla, {"name": "gdla"}),
    (naive_lion, {"name": "lion"}),
    (naive_lion, {"name": "lion", "decay": "selective"}),
    (naive_lion, {"name": "lion", "decay": "selective", "order": "normal"}),
    (naive_delta, {"name": "delta"}),
    (naive_delta, {"name": "delta", "directions": 4}),
    (naive_delta, {"name": "gated_delta"}),
    (naive_delta, {"name": "gated_delta", "directions": 4}),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("naive", "spec"), FORMULAS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_equals_formula(
    naive: Callable[[Any, Any, Grid], Tensor], spec: dict[str, Any], grid: Grid, monkeypatch
) -> None:
    """Output and gradients of inputs and parameters; in chunks of 16 tokens where there are more."""
    for module in (lion, delta):
        monkeypatch.setattr(module, "CHUNK", 16)
    module = mechanism(spec, grid, dim=12, num_heads=2)
    given = inputs(module, grid, grad=True)
    want = naive(module, given, grid)
    leaves = [*given.tensors, *(p for p in module.parameters() if p.requires_grad)]
    assert_same_gradients(given(module, grid), want, leaves, 1e-8)


MASKED = [
    {"name": "sla", "window_size": 3},
    {"name": "sla", "topk": 0.3, "blocks": [5, 6]},
    {"name": "lolcats", "window_size": 3},
    {"name": "window", "window_size": 3},
]
MASKED += [{"name": "lion", "decay": "selective"}, {"name": "gated_delta"}, {"name": "jetvit"}, {"name": "gdla"}]
MASKED += [{"name": "lolcats", "window_size": 3, "local": "neighbourhood"}]


@pytest.mark.parametrize("spec", MASKED, ids=str)
def test_masked_keys_of_whole_windows(spec: dict[str, Any]) -> None:
    """Windows without any key left give finite numbers, which the masked keys and values do not change."""
    grid = Grid((6, 6))
    module = mechanism(spec, grid, dim=12, num_heads=2)
    given = inputs(module, grid)
    mask = torch.ones(2, 36, dtype=torch.bool)
    mask[0, :18] = False
    hidden = ~mask[:, None, :, None]
    k, v = (torch.where(hidden, randn(*x.shape, seed=9), x) for x in (given.k, given.v))
    out = module(given.q, given.k, given.v, grid, mask=mask, **given.extra)
    assert out.isfinite().all()
    assert_near(module(given.q, k, v, grid, mask=mask, **given.extra), out, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [{"name": "window", "window_size": 5}, "sla", "lolcats", "jetvit", "gdla", "lion", "delta"], ids=str
)
def test_one_program_serves_images_of_any_size(spec: Any) -> None:
    """Windows are counted by a quotient that ONNX rounds towards zero; chunks are read by a loop (`scan`)."""
    subject = BackboneSubject({"name": "deit_nano", "depth": 1}, spec, 32, False)
    assert subject.build(dtype=torch.float32).blocks[0].attn.mechanism.__dict__.get("exports_any_size", True)
    exports(subject)
    onnx(subject)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lion", "delta"])
def test_a_saved_program_with_a_loop_serves_images_of_any_size(name: str) -> None:
    network = linvit.create_backbone("deit_nano", depth=1, attention=name).eval()
    free = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    file = io.BytesIO()
    with torch.no_grad():
        torch.export.save(torch.export.export(network, (randn(2, 3, 32, 32).float(),), dynamic_shapes=(free,)), file)
        file.seek(0)
        program = torch.export.load(file).module()
        for batch, height, width in ((1, 16, 24), (3, 64, 48)):
            images = randn(batch, 3, height, width).float()
            assert_near(program(images), network(images), 1e-5)


@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0])
def test_the_inverse_is_exact_for_keys_that_are_alike(noise: float) -> None:
    """Powers of A, whose alternating series is the inverse as well, have entries of 10^9 here."""
    keys = F.normalize(randn(2, 1, 16) + noise * randn(2, 64, 16, seed=1), dim=-1)
    exact = (0.95 * keys @ keys.mT).tril(-1).requires_grad_()
    given = exact.detach().float().requires_grad_()
    weights = randn(2, 64, 64, seed=2)
    want = torch.linalg.inv(torch.eye(64, dtype=torch.double) + exact)
    got = delta.inverse(given)
    assert_near(got, want, 1e-5)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    assert_near(given.grad, exact.grad.tril(-1), 1e-5)


@pytest.mark.slow
def test_gradients_of_the_compiled_gated_delta_rule() -> None:
    grid = Grid((6, 8), num_prefix=1)
    layer = AttentionLayer(24, 3, grid, attention="gated_delta").double()
    x = randn(2, 49, 24)
    grads = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        run(x, grid).square().sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    for one, other in zip(*grads, strict=True):
        assert_near(one, other, 1e-9)


def test_a_window_as_large_as_the_grid_is_softmax() -> None:
    grid = Grid((5, 7), num_prefix=2)
    window, softmax = (mechanism(name, grid) for name in ("window", "softmax"))
    given = inputs(window, grid)
    assert_near(given(window, grid), given(softmax, grid), 1e-12)


def test_windows_make_a_block_diagonal_matrix() -> None:
    grid = Grid((4, 6))
    module = mechanism({"name": "window", "window_size": 2}, grid)
    given = inputs(module, grid)
    matrix = attention_matrix(module, given.q, given.k, grid)
    assert ((matrix != 0) == near(grid, 2)).all()


def test_the_maximum_is_part_of_lolcats_as_published() -> None:
    """It weighs the linear part the more, the sharper a row is; without `shift` it cancels."""
    grid = Grid((4, 4))
    shares = []
    for shift in (True, False):
        module = mechanism({"name": "lolcats", "window_size": 2, "shift": shift}, grid)
        given = inputs(module, grid, scale=4.0)
        matrix = attention_matrix(module, given.q, given.k, grid)
        shares.append(float(matrix.masked_fill(near(grid, 2), 0).sum(-1).mean()))
    assert shares[0] > shares[1] + 0.2


def test_places_beyond_the_edge_hold_no_token() -> None:
    windows = Windows(Grid((5, 7), num_prefix=2), 3)
    x = randn(2, 3, 37, 4)
    assert torch.equal(windows.join(windows.split(x)), x[:, :, 2:])
    assert int(windows.kept(None, x)[..., 2:].sum()) == 35


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "lolcats", "local": "neighbourhood", "window_size": 4}, "window_size"),
        ({"name": "window", "window_size": 0}, "window_size"),
        ({"name": "sla", "linear": "none"}, "linear"),
        ({"name": "sla", "topk": 0}, "topk"),
        ({"name": "sla", "blocks": [64]}, "blocks must be two"),
        ({"name": "jetvit", "kernel_size": 4}, "kernel_size"),
        ({"name": "lion", "order": "z"}, "order"),
        ({"name": "delta", "directions": 3}, "directions"),
        ({"name": "gdla", "key_dim": 3}, "even"),
    ],
    ids=str,
)
def test_refused_options(spec: dict[str, Any], message: str) -> None:
    context = {"key_dim": spec.pop("key_dim")} if "key_dim" in spec else {}
    with pytest.raises(UserError, match=message):
        create_attention(spec, dim=12, num_heads=2, grid=Grid((4, 4)), **context)
