"""Modules resize their own tables: mechanisms, hosts, backbones, a plug-in's, and timm's."""

import math
import sys
from functools import partial

import pytest
import timm
import torch
from torch import nn

import linvit
from linvit.attention.ops.functional import grid_from_count, resize_table
from linvit.weights.load import load_pretrained
from tests.helpers import assert_near, perturb, randn

SQUARE = partial(grid_from_count, img_size=(1, 1))
LINFORMER = {"name": "linformer", "k": 9}


class Gain(linvit.Attention):
    """A mechanism of a plug-in: a gain per patch, and a table in a module of its own."""

    def __init__(self, dim, num_heads, grid):
        super().__init__(dim, num_heads, grid)
        self.gain = nn.Parameter(torch.ones(1, math.prod(grid.size), 1))
        self.inner = nn.Embedding(grid.num_keys, 1)

    def forward(self, q, k, v, grid):
        return v * self.gain.mean() + self.inner.weight.mean()

    def resize_tables(self, state, size_of):
        if "gain" in state:
            state["gain"] = resize_table(state["gain"], self.gain, self.grid.size, size_of)
        if "inner.weight" in state:
            state["inner.weight"] = resize_table(state["inner.weight"], self.inner.weight, self.grid.size, size_of)
        return state


def create(spec, **options):
    return perturb(linvit.create_backbone(spec, num_classes=2, **options)).eval()


def resized(there, here):
    """The report of loading one model's weights into another, which are then all there."""
    report = load_pretrained(here, there)
    assert report.fraction == 1
    assert (report.missing, report.unexpected, report.initialised) == ({}, [], {})
    return report


def leaves(report):
    return {name.rpartition(".")[2] for name in report.resized}


DEIT = {"name": "deit_tiny", "depth": 2, "embed_dim": 24, "num_heads": 2, "patch_size": 16}
PYRAMID = {"embed_dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 3, 4]}
SWIN = {"name": "swin_tiny", "embed_dim": 16, "depths": [1, 2, 1, 1], "num_heads": [1, 2, 4, 8]}
SMALL_SWIN = {"embed_dim": 16, "depths": (1, 2), "num_heads": (1, 2)}  # timm's
CSWIN = {"name": "cswin_tiny", "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4]}


class TestFiles:
    """Checkpoints of official programs and of linvit, which differ in what they say of their images."""

    def save(self, path, model, **content):
        torch.save({"state_dict": model.state_dict(), **content}, path)
        return path

    @pytest.mark.parametrize(("there", "here"), [(224, (96, 160)), ((224, 320), 160)], ids=str)
    def test_a_run_of_linvit_says_the_size_of_its_images(self, tmp_path, there, here):
        model, old = create(DEIT, img_size=here), create(DEIT, img_size=there)
        path = self.save(tmp_path / "x.ckpt", old, hyper_parameters={"img_size": there})
        assert leaves(resized(path, model)) == {"pos_embed"}
        image = there if isinstance(there, tuple) else (there, there)
        size_of = partial(grid_from_count, img_size=image)
        assert torch.equal(model.pos_embed, resize_table(old.pos_embed, model.pos_embed, model.grid.size, size_of))

    def test_a_grid_of_as_many_patches_but_another_shape(self, tmp_path):
        """7 x 28 or 14 x 14: official files are square, a run says what it is, a state dict is taken as it is."""
        square, wide, other = (create(DEIT, img_size=size) for size in (224, (112, 448), (112, 448)))
        table = resize_table(square.pos_embed, wide.pos_embed, (7, 28), SQUARE)
        assert list(resized(self.save(tmp_path / "x.pth", square), wide).resized) == ["pos_embed"]
        assert torch.equal(wide.pos_embed, table)
        path = self.save(tmp_path / "x.ckpt", square, hyper_parameters={"img_size": [112, 448]})
        assert not resized(path, wide).resized
        assert torch.equal(wide.pos_embed, square.pos_embed)
        assert not resized(other.state_dict(), wide).resized
        assert torch.equal(wide.pos_embed, other.pos_embed)

    @pytest.mark.parametrize("hyper_parameters", [None, 3, {}, {"img_size": "large"}, {"img_size": [1, 2, 3]}], ids=str)
    def test_one_that_does_not_say_it_is_taken_for_square(self, tmp_path, hyper_parameters):
        path = self.save(tmp_path / "x.ckpt", create(DEIT), hyper_parameters=hyper_parameters)
        assert leaves(resized(path, create(DEIT, img_size=(96, 160)))) == {"pos_embed"}


@pytest.mark.parametrize(("here", "class_token"), [((96, 160), True), (160, False)], ids=str)
class TestLinformer:
    """Its matrices follow the size of the images as its docstring promises."""

    def models(self, here, class_token, **options):
        pool = "token" if class_token else "avg"
        spec = {**DEIT, "attention": {**LINFORMER, **options}, "class_token": class_token, "global_pool": pool}
        return create(spec), create(spec, img_size=here)

    def test_a_model_of_another_size_computes_what_the_first_does_there(self, here, class_token):
        old, new = self.models(here, class_token)
        assert leaves(resized(old.state_dict(), new)) == {"pos_embed", "proj_k", "proj_v"}
        tokens = randn(2, new.grid.num_queries, 24).float()
        for one, other in zip(old.blocks, new.blocks, strict=True):
            assert torch.allclose(one(tokens, new.grid), other(tokens, new.grid), atol=1e-6)

    @pytest.mark.parametrize("share", ["kv", "layerwise", "none"])
    def test_however_they_are_shared(self, here, class_token, share):
        old, new = self.models(here, class_token, share=share)
        assert {"pos_embed", "proj_k"} <= leaves(resized(old.state_dict(), new))

    def test_a_slice_takes_the_first_columns(self, here, class_token):
        old, new = self.models(here, class_token, resize="slice")
        resized(old.state_dict(), new)
        before, after = (model.blocks[0].attn.mechanism.proj_k for model in (old, new))
        assert torch.equal(after, before[..., : after.shape[-1]])
        report = load_pretrained(old, new.state_dict(), min_fraction=0)
        assert "blocks.0.attn.mechanism.proj_k" in report.missing  # a slice cannot grow


@pytest.mark.parametrize(("size", "old_size"), [(256, (224, 320)), ((160, 256), 224)], ids=str)
@pytest.mark.parametrize(
    ("spec", "tables"),
    [
        ({**DEIT, "rel_pos_bias": True}, {"pos_embed", "relative_position_bias_table"}),
        (
            {**DEIT, "attention": "focused", "class_token": False, "global_pool": "avg"},
            {"pos_embed", "positional_encoding"},
        ),
        (
            {**DEIT, "attention": f"{__name__}:Gain", "class_token": False, "global_pool": "avg"},
            {"pos_embed", "gain", "weight"},
        ),
        ({"name": "pvt_tiny", **PYRAMID, "attention": "focused"}, {"pos_embed", "positional_encoding"}),
        ({"name": "pvt_tiny", **PYRAMID, "attention": {**LINFORMER, "k": 4}}, {"pos_embed", "proj_k", "proj_v"}),
        ({"name": "soft_tiny", **PYRAMID}, set()),
        ({**SWIN, "window_size": None, "attention": LINFORMER}, {"proj_k", "proj_v"}),
        ({**CSWIN, "attention": {**LINFORMER, "k": 4}}, {"proj_k", "proj_v"}),
    ],
    ids=["relative positions", "focused", "plug-in", "pvt focused", "pvt linformer", "soft", "whole map", "stripes"],
)
def test_every_table_is_resized(tmp_path, spec, tables, size, old_size):
    """From square and other images to square and other ones. SOFT's positions are of 224 x 224 in every model."""
    model, old = create(spec, img_size=size), create(spec, img_size=old_size)
    torch.save({"state_dict": old.state_dict(), "hyper_parameters": {"img_size": old_size}}, tmp_path / "x.ckpt")
    report = resized(tmp_path / "x.ckpt", model)
    assert leaves(report) == tables
    other = {name for name, own in model.state_dict().items() if own.shape != old.state_dict()[name].shape}
    assert other <= report.resized.keys()


def test_a_stripe_keeps_its_width(tmp_path):
    """64 tokens are 8 x 8 in an image, and 64 x 1 in a stripe."""
    spec = {**CSWIN, "attention": "focused"}
    model, old = create(spec, img_size=224), create(spec, img_size=256)
    torch.save(old.state_dict(), tmp_path / "x.pth")
    resized(tmp_path / "x.pth", model)
    for name, size, before in (("0", (56, 1), (64, 1)), ("1", (1, 56), (1, 64))):
        key = f"stages.0.blocks.0.attn.branches.{name}.mechanism.positional_encoding"
        own, given = model.state_dict()[key], old.state_dict()[key]
        assert torch.equal(own, resize_table(given, own, size, lambda _, before=before: before))


@pytest.mark.parametrize("size", [224, (224, 320)], ids=str)
def test_windows_are_square_whatever_the_image(tmp_path, size):
    old, new = create(SWIN, img_size=size), create({**SWIN, "window_size": 12}, img_size=384)
    torch.save({"state_dict": old.state_dict(), "hyper_parameters": {"img_size": size}}, tmp_path / "x.ckpt")
    assert leaves(resized(tmp_path / "x.ckpt", new)) == {"relative_position_bias_table"}
    name = "stages.0.blocks.0.attn.relative_position_bias_table"
    own = new.state_dict()[name]
    assert torch.equal(own, resize_table(old.state_dict()[name], own, (23, 23), SQUARE))


class TestTimm:
    """timm's modules have no such method, so linvit resizes what they have, as timm does."""

    @pytest.mark.parametrize("attention", [None, LINFORMER], ids=str)
    def test_positions(self, tmp_path, attention):
        spec = {"name": "timm", "model": "test_vit"}
        torch.save(create(spec, attention=attention).state_dict(), tmp_path / "x.pth")
        report = resized(tmp_path / "x.pth", create(spec, attention=attention, img_size=(160, 256)))
        assert leaves(report) == {"pos_embed"} | ({"proj_k", "proj_v"} if attention else set())

    @pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple sequence")  # timm's
    @pytest.mark.parametrize(
        ("model", "there", "here", "options", "table"),
        [
            ("vit_tiny_patch16_224", 224, (160, 256), {"depth": 1}, "pos_embed"),
            ("beit_base_patch16_224", 64, 96, {"depth": 1, "embed_dim": 24, "num_heads": 2}, "bias_table"),
            ("swin_tiny_patch4_window7_224", 56, 64, SMALL_SWIN, "bias_table"),
            ("maxvit_tiny_tf_224", 64, 96, {"depths": (1,), "embed_dim": (32,), "block_type": ("M",)}, "bias_table"),
        ],
    )
    def test_tables_are_those_of_timms_loader(self, model, there, here, options, table):
        old, theirs, ours = (
            timm.create_model(
                model,
                img_size=size,
                num_classes=2,
                **options,
                **({"window_size": size // 8} if "swin" in model else {}),
            )
            for size in (there, here, here)
        )
        perturb(old)
        loader = sys.modules[type(old).__module__].checkpoint_filter_fn
        theirs.load_state_dict(loader(old.state_dict(), theirs))
        report = resized({"model": old.state_dict()}, ours)
        assert report.resized
        assert all(name.endswith(table) for name in report.resized)
        assert all(torch.equal(own, theirs.state_dict()[name]) for name, own in ours.state_dict().items())

    @pytest.mark.parametrize(
        ("model", "options", "names"),
        [
            ("tnt_s_legacy_patch16_224", {"depth": 1}, {"patch_pos"}),
            ("pit_ti_224", {}, {"pos_embed"}),
            ("hiera_tiny_224", {"stages": (1, 1, 1, 1)}, {"pos_embed"}),
            ("samvit_base_patch16", {"depth": 1, "global_attn_indexes": (0,)}, {"pos_embed", "rel_pos_h", "rel_pos_w"}),
        ],
    )
    def test_tables_that_timms_loader_leaves(self, model, options, names):
        old, new = (timm.create_model(model, img_size=size, num_classes=2, **options) for size in (64, (96, 64)))
        for name, table in old.named_parameters():
            if name.rpartition(".")[2] in names:  # whose mean stays
                torch.nn.init.constant_(table, 3.0)
        report = resized({"model": old.state_dict()}, new)
        assert leaves(report) == names - {"rel_pos_w"}
        for name in report.resized:
            assert_near(new.state_dict()[name], torch.full_like(new.state_dict()[name], 3.0), 1e-5)

    @pytest.mark.parametrize("shape", [(1, 192, 0, 0), (1, 64, 27)], ids=str)
    def test_tables_of_other_kinds_stay_as_they_are(self, shape):
        model = timm.create_model("pit_ti_224", num_classes=2)
        report = load_pretrained(model, {"model": {**model.state_dict(), "pos_embed": torch.zeros(shape)}})
        assert (report.missing.keys(), report.resized) == ({"pos_embed"}, {})
