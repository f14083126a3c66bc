"""Position tables on another grid, against interpolation by hand."""

import pytest
import torch
from torch.nn import functional as F

import linvit
from linvit.weights.resize import Table, resize, square, table_of
from tests.helpers import randn

MODES = ["bicubic", "bilinear"]


def by_hand(table, size, mode):
    side = int(len(table) ** 0.5)
    plane = table.T.reshape(1, -1, side, side)
    return F.interpolate(plane, size=size, mode=mode, align_corners=False).flatten(2)[0].T


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(24, 24), (10, 32), (3, 5), (14, 14), (1, 1)], ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_the_grid_is_interpolated_and_the_prefix_stays(mode, size, prefix):
    given = randn(1, prefix + 196, 8).float()
    own = randn(1, prefix + size[0] * size[1], 8).float()
    got = resize(given, own, Table(size, prefix, mode))
    assert torch.equal(got[:, :prefix], given[:, :prefix])
    assert torch.allclose(got[0, prefix:], by_hand(given[0, prefix:], size, mode), atol=1e-5)


def test_the_same_grid_is_not_touched():
    given = randn(1, 197, 8)
    assert torch.equal(resize(given.float(), given.float(), Table((14, 14), 1)), given.float())


def test_half_precision_is_interpolated_in_float32():
    given = randn(1, 49, 8).half()
    got = resize(given, torch.zeros(1, 64, 8), Table((8, 8)))
    assert got.dtype == torch.float16
    assert torch.equal(got, resize(given.float(), torch.zeros(1, 64, 8), Table((8, 8))).half())


@pytest.mark.parametrize(("there", "here"), [(1, 0), (2, 0), (0, 1), (0, 2), (1, 2), (2, 1)])
def test_a_class_token_more_or_less(there, here):
    given, own = randn(1, there + 49, 4).float(), randn(1, here + 49, 4, seed=1).float()
    got = resize(given, own, Table((7, 7), here))
    shared = min(there, here)
    assert torch.equal(got[:, :shared], given[:, :shared])
    assert torch.equal(got[:, shared:here], own[:, shared:here])
    assert torch.equal(got[:, here:], given[:, there:])


@pytest.mark.parametrize("shape", [(1, 8, 4), (1, 49, 5), (49, 4), (2, 49, 4), (49,), (), (1, 0, 4)], ids=str)
def test_what_does_not_fit(shape):
    assert resize(torch.ones(shape), torch.ones(1, 64, 4), Table((8, 8))) is None


def test_relative_positions():
    given = randn(13 * 13, 3).float()
    got = resize(given, torch.zeros(23 * 23, 3), Table((23, 23)))
    assert torch.allclose(got, by_hand(given, (23, 23), "bicubic"), atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "prefix", "found"), [(197, 1, (14, 1)), (197, 0, (14, 1)), (198, 1, (14, 2)), (12, 1, None)]
)
def test_the_side_of_a_table(rows, prefix, found):
    assert square(rows, prefix) == found


@pytest.mark.parametrize(
    ("backbone", "size", "tables"),
    [
        ("deit_tiny", (224, 320), {"pos_embed": Table((14, 20), 1)}),
        (
            {"name": "deit_tiny", "depth": 1, "rel_pos_bias": True},
            (224, 320),
            {"pos_embed": Table((14, 20), 1), "blocks.0.attn.relative_position_bias_table": Table((27, 39))},
        ),
        (
            "flatten_deit_tiny",
            224,
            {"pos_embed": Table((14, 14)), "blocks.0.attn.mechanism.positional_encoding": Table((14, 14))},
        ),
        (
            "pvt_tiny",
            (64, 96),
            {
                "stages.0.pos_embed": Table((16, 24), 0, "bilinear"),
                "stages.3.pos_embed": Table((2, 3), 1, "bilinear"),
            },
        ),
        ("swin_tiny", 224, {"stages.2.blocks.1.attn.relative_position_bias_table": Table((13, 13))}),
        ({"name": "timm", "model": "vit_tiny_patch16_224"}, (224, 320), {"pos_embed": Table((14, 20), 1)}),
        (
            {"name": "timm", "model": "swin_tiny_patch4_window7_224"},
            224,
            {"layers.0.blocks.0.attn.relative_position_bias_table": Table((13, 13))},
        ),
    ],
    ids=str,
)
def test_the_tables_of_models(backbone, size, tables):
    model = linvit.create_backbone(backbone, img_size=size, num_classes=2)
    found = {name: table_of(model, name, own) for name, own in model.state_dict().items()}
    for name, table in tables.items():
        assert found[name] == table
    leaves = {name.rpartition(".")[2] for name, table in found.items() if table is not None}
    assert leaves == {name.rpartition(".")[2] for name in tables}
