"""SOFT and SOFT++ equal their reference code; any attention takes the place of theirs; images of any size."""

from functools import cache
from typing import Any

import pytest
import timm.optim
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import linvit
from linvit import Grid, UserError
from linvit.attention.soft import SoftAttention
from linvit.attention.soft_norm import SoftNormAttention
from linvit.attention.softmax import SoftmaxAttention
from linvit.backbones.soft import SOFT, PostNormBlock, softmax_free
from linvit.layers.block import Block
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.backbones import SOFT as LAYOUT
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, perturb, randn
from tests.official import fill, images
from tests.official.soft import SIZES as OFFICIAL
from tests.official.soft import soft as official_soft

SIZES = {"embed_dims": (16, 24, 32, 40), "num_heads": (2, 2, 4, 5), "depths": (1, 1, 2, 1), "num_classes": 7}


def soft(**options: Any) -> SOFT:
    """A small SOFT in evaluation mode."""
    torch.manual_seed(0)
    return SOFT(**{**SIZES, "img_size": 64, **options}).eval()


def stages(name: str, **options: Any) -> list[Any]:
    """The papers' attention of the four stages, with more options in the first three."""
    *early, last = softmax_free(name)
    return [*({**spec, **options} for spec in early), last]


def reference_stages(name: str, **options: Any) -> list[Any]:
    """As the reference computes it: one alpha for the batch in SOFT++."""
    return stages(name, **options, **({"alpha_scope": "batch"} if name == "soft_norm" else {}))


def load_official(model: nn.Module, state: dict[str, Tensor]) -> None:
    model.load_state_dict(fit_projections(LAYOUT.translate(state), model), strict=True)


def image(*size: int, batch: int = 2, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    return randn(batch, 3, *size, dtype=dtype, grad=grad)


# The references


@both_precisions
@of_case("soft", "softpp")
def test_equals_the_reference(golden: Golden, dtype: torch.dtype) -> None:
    official = golden.constructor
    name = "soft" if golden.meta["case"] == "soft" else "soft_norm"
    model = SOFT(
        img_size=official["img_size"],
        num_classes=official["num_classes"],
        attention=reference_stages(name, newton_iters=official["newton_max_iter"]),
        embed_dims=official["embed_dims"],
        num_heads=official["num_heads"],
        depths=official["depths"],
        mlp_ratio=official["mlp_ratios"][3],
    )
    load_official(model, golden.parameters())
    model.to(dtype).eval()
    (x,) = inputs = golden.inputs(dtype)
    golden.check_call(model(x), inputs)
    _, features = model.forward_intermediates(x)
    for stage, feature in zip((2, 3, 4), features[:3], strict=True):
        golden.check(f"stage.patch_embed{stage}.input", feature)
    golden.check("stage.norm.output", model.forward_features(x))


@cache
def tiny_state() -> dict[str, Tensor]:
    return fill(official_soft(**OFFICIAL["tiny"]))


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "size", "first", "total", "mean", "second"),
    [
        pytest.param(
            "soft",
            (224, 224),
            [0.087593245, 0.029031588, 0.19701002, 0.5076676],
            -74.778067,
            0.36413914,
            0.11231073,
            marks=pytest.mark.slow,
        ),
        (
            "soft",
            (256, 320),
            [0.19673831, -0.059706144, 0.25016685, 0.17760498],
            -70.479623,
            0.36745676,
            0.18507556,
        ),
        pytest.param(
            "soft_norm",
            (224, 224),
            [0.093040076, 0.06549111, 0.33859877, 0.70748229],
            -62.845476,
            0.3630238,
            0.075061022,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tiny_gives_the_reference_values(
    name: str, size: tuple[int, int], first: list[float], total: float, mean: float, second: float
) -> None:
    """Numbers of the official classes in float64 for parameters that follow from their names."""
    model = linvit.create_backbone("soft_tiny", attention=reference_stages(name)).double().eval()
    load_official(model, tiny_state())
    out = model(images(*size))
    got = [*out[0, :4].tolist(), out.sum().item(), out.abs().mean().item(), out[1, 0].item()]
    assert got == pytest.approx([*first, total, mean, second], rel=1e-6)


def on_meta(name: str, **options: Any) -> SOFT:
    """A preset without memory or numbers."""
    with torch.device("meta"):
        model = linvit.create_backbone(name, **options)
    assert isinstance(model, SOFT)
    return model.eval()


def saved_products(model: SOFT) -> int:
    """MACs at 224 x 224 that the reference's formulas take and ours, of equal value, do not."""
    saved = 0
    for stage, side in zip(model.stages[:3], (56, 28, 14), strict=True):
        tokens, m = side**2, 49
        for block in stage.blocks:
            heads, width = block.attn.mechanism.num_heads, block.attn.mechanism.head_dim
            saved += heads * 2 * (tokens + m) * m * width  # squared lengths as products with a matrix of ones
            saved += heads * (tokens * m * m - m * m * width)  # (P Y)(P^T v) for P (Y (P^T v))
    return saved


@torch.no_grad()
@pytest.mark.parametrize(
    ("size", "soft_macs", "norm_macs"),
    [
        ("tiny", 2_220_943_416, 2_260_944_076),
        pytest.param("small", 7_716_821_776, 7_930_001_764, marks=pytest.mark.slow),
        pytest.param("medium", 9_071_971_628, 9_335_740_686, marks=pytest.mark.slow),
        pytest.param("large", 13_732_324_976, 14_134_449_258, marks=pytest.mark.slow),
        pytest.param("huge", 19_404_185_716, 19_935_959_196, marks=pytest.mark.slow),
    ],
)
def test_products_are_those_of_the_official_classes(size: str, soft_macs: int, norm_macs: int) -> None:
    """To the last one, once other formulas of equal value are accounted for."""
    for name, macs in ((f"soft_{size}", soft_macs), (f"soft_norm_{size}", norm_macs)):
        model = on_meta(name)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 3, 224, 224, device="meta"))
        missing = macs - counter.get_total_flops() // 2 - saved_products(model)
        cube = 49**3 * sum(block.attn.mechanism.num_heads for stage in model.stages[:3] for block in stage.blocks)
        if name.startswith("soft_norm"):  # the reference tests its start 1 to 11 times, as the data will; ours is once
            assert 0 <= missing <= 10 * cube
        else:  # ours has two products more, which carry the gradient of the inverse
            assert missing == -2 * cube


def test_small_of_the_readme() -> None:
    """24 million parameters instead of the code's 38.9."""
    model = on_meta("soft_small", depths=[1, 3, 7, 4])
    assert sum(p.numel() for p in model.parameters()) == 24_110_092


@pytest.mark.parametrize(("name", "size"), [*(("soft", size) for size in OFFICIAL), ("soft_norm", "tiny")])
def test_official_names_and_shapes_are_those_of_the_model(name: str, size: str) -> None:
    model = on_meta(f"{name}_{size}")
    state = {key: torch.empty(shape, device="meta") for key, shape in official_soft(**OFFICIAL[size]).items()}
    ours = fit_projections(LAYOUT.translate(state), model)
    want = {key: t.shape for key, t in model.state_dict().items() if not key.endswith("num_batches_tracked")}
    assert {key: t.shape for key, t in ours.items()} == want


def test_layout_recognises_its_own_names_only() -> None:
    assert LAYOUT.recognises(official_soft(**OFFICIAL["tiny"]))
    assert not LAYOUT.recognises(linvit.create_backbone("deit_nano").state_dict())
    assert not LAYOUT.recognises(soft().state_dict())


# Blocks


@pytest.mark.parametrize("name", ["soft_tiny", "soft_norm_tiny"])
def test_presets_have_softmax_free_stages_and_a_softmax_stage(name: str) -> None:
    model = on_meta(name)
    kind = SoftNormAttention if name == "soft_norm_tiny" else SoftAttention
    for stage, ratio, conv_size in zip(model.stages, (8, 4, 2), (9, 5, 3), strict=False):
        for block in stage.blocks:
            assert type(block) is PostNormBlock
            assert type(block.attn.mechanism) is kind
            assert block.attn.mechanism.kernels.ratio == ratio
            assert block.attn.mechanism.conv.kernel_size == (conv_size, conv_size)
            assert block.attn.mechanism.inverse.iters == 20
            assert block.attn.mechanism.inverse.alpha_scope == "head"
    for block in model.stages[3].blocks:
        assert type(block) is Block
        assert type(block.attn.mechanism) is SoftmaxAttention


def test_post_norm_block_is_its_formula() -> None:
    block = perturb(soft().stages[0].blocks[0].double())
    grid = Grid((5, 7))
    x = randn(2, 35, 16, grad=True)

    def norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
        deviation = x - x.mean(-1, keepdim=True)
        return deviation / (deviation.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight + module.bias

    y = norm(block.norm1, x + block.attn(x, grid))
    hidden = block.mlp.fc1(y)
    assert hidden.shape[-1] == 64
    hidden = hidden * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
    want = norm(block.norm2, y + block.mlp.fc2(hidden))
    assert_same_gradients(block(x, grid), want, [x, *block.parameters()], 1e-9)


def test_norms() -> None:
    """LayerNorms of stage 4 and the last one have an epsilon of 1e-6, the others torch's."""
    for name, module in soft().named_modules():
        if isinstance(module, nn.LayerNorm):
            assert module.eps == (1e-6 if name.startswith(("stages.3", "norm")) else 1e-5), name


def test_mlp_ratio_is_that_of_the_last_stage() -> None:
    model = soft(mlp_ratio=2.5)
    layers = [stage.blocks[0].mlp.fc1 for stage in model.stages]
    assert [layer.out_features / layer.in_features for layer in layers] == [4, 4, 4, 2.5]


# Attention


def test_bare_name_is_for_the_last_stage_too() -> None:
    model = on_meta("soft_tiny", attention="soft")
    mechanisms = [stage.blocks[0].attn.mechanism for stage in model.stages]
    assert [type(mechanism) for mechanism in mechanisms] == [SoftAttention] * 4
    assert [mechanism.kernels.ratio for mechanism in mechanisms] == [8, 4, 2, 1]
    assert mechanisms[3].grid == Grid((7, 7), num_prefix=1)


def test_mechanisms_are_built_for_the_grids_of_img_size() -> None:
    model = soft(attention="focused", img_size=(96, 160))
    grids = [stage.blocks[0].attn.mechanism.grid for stage in model.stages]
    assert grids == [Grid((24, 40)), Grid((12, 20)), Grid((6, 10)), Grid((3, 5), num_prefix=1)]


# Sizes


def test_weights_do_not_depend_on_the_image_size() -> None:
    """Position tables are those of 224 x 224, whatever `img_size`."""
    small, large = ({key: t.shape for key, t in soft(img_size=side).state_dict().items()} for side in (64, (224, 512)))
    assert small == large
    assert [small[f"stages.{i}.pos_embed"][1] for i in range(4)] == [3136, 784, 196, 50]


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("size", [(512, 512), (800, 1333)], ids=str)
def test_large_images(size: tuple[int, int]) -> None:
    """256 and 1025 landmarks."""
    model = soft(depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))
    assert model(image(*size, batch=1, dtype=torch.float32)).isfinite().all()


def test_positions_are_interpolated_bilinearly() -> None:
    stage = soft().stages[3].double()
    stage.blocks = nn.ModuleList()
    stage.embed.forward = lambda x: (x, (2, 3))
    table = stage.pos_embed.detach()
    want = nn.functional.interpolate(table[:, 1:].mT.unflatten(2, (7, 7)), (2, 3), mode="bilinear", align_corners=False)
    tokens, grid = stage(torch.zeros(1, 6, 40))
    assert_near(grid.plane(tokens), want, 1e-12)
    assert_near(tokens[:, 0], table[:, 0] + stage.cls_token[:, 0], 1e-12)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (1, 2, 1)}, r"depths must list 4 values, one per stage; got \[1, 2, 1\]"),
        ({"embed_dims": (8,) * 5}, r"embed_dims must list 4 values, one per stage; got \[8, 8, 8, 8, 8\]"),
        ({"num_heads": [2]}, r"num_heads must list 4 values, one per stage; got \[2\]"),
        ({"num_heads": (2, 5, 4, 5)}, "dim 24 is not divisible by num_heads 5"),
        ({"img_size": 0}, "img_size must be a positive side"),
        ({"attention": "softmx"}, "Did you mean 'softmax'"),
    ],
    ids=str,
)
def test_bad_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        soft(**options)


# Training


def test_dropout_is_on_the_branches_in_training_only() -> None:
    block = soft(depths=(1, 1, 1, 2), drop_path_rate=0.8).stages[2].blocks[0].double()
    block.norm1, block.norm2 = nn.Identity(), nn.Identity()
    block.attn.forward = block.mlp.forward = lambda x, grid: torch.ones_like(x)
    x = randn(2, 9, 32)
    torch.manual_seed(0)
    added = block.train()(x, Grid((3, 3))) - x
    assert block.drop.p == pytest.approx(0.4)
    factors = (added * 0.6).round()  # 0, 1 or 2 of the branches kept, each divided by 0.6
    assert_near(added, factors / 0.6, 1e-7)  # the rates are float32
    assert len(factors[0, 0].unique()) == 3  # single entries of a token, not samples
    assert_near(block.eval()(x, Grid((3, 3))), x + 2, 1e-12)


@pytest.mark.parametrize("name", ["soft_tiny", "soft_norm_tiny"])
def test_initial_values(name: str) -> None:
    """SOFT++ leaves the blocks of stages 1 to 3 at torch's values, uniform within 1 / sqrt(fan in)."""
    torch.manual_seed(0)
    model = linvit.create_backbone(name, img_size=32)
    for stage in model.stages:
        assert stage.pos_embed.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.stages[3].cls_token.std().item() == pytest.approx(0.02, rel=0.15)
    for key, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if name == "soft_norm_tiny" and key.startswith(("stages.0", "stages.1", "stages.2")):
                bound = module.in_features**-0.5
                assert 0.95 * bound < module.weight.abs().max() <= bound, key
                assert module.bias.abs().max() > 0.5 * bound, key
            else:
                assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), key
                assert module.bias.eq(0).all(), key
        if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
            assert module.weight.eq(1).all(), key
            assert module.bias.eq(0).all(), key
    assert 0.9 / 27**0.5 < model.stages[0].embed.proj[0].weight.abs().max() <= 27**-0.5


def test_weight_decay_and_layer_groups() -> None:
    model = soft()
    assert model.no_weight_decay() == {"stages.3.cls_token"}
    groups = timm.optim.param_groups_layer_decay(model, 0.1, model.no_weight_decay(), layer_decay=0.5)
    names = {id(p): key for key, p in model.named_parameters()}
    found = {names[id(p)]: (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(found) == len(names)
    assert found["stages.3.cls_token"][1] == 0
    assert found["stages.3.pos_embed"][1] == 0.1
    scales = [
        found[key][0]
        for key in (
            "stages.0.embed.proj.0.weight",
            "stages.0.blocks.0.mlp.fc1.weight",
            "stages.1.embed.proj.0.weight",
            "stages.2.blocks.0.mlp.fc1.weight",
            "stages.2.blocks.1.mlp.fc1.weight",
            "stages.3.blocks.0.mlp.fc1.weight",
            "head.weight",
        )
    ]
    assert scales == sorted(scales)
    assert scales[0] < scales[1] < scales[2]
    assert scales[3] < scales[4] < scales[5] < scales[6] == 1
