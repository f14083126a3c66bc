"""ViTDet: its windows and positions by their formula, detectron2's names, and its published size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linvit
from linvit import UserError
from linvit.analysis.operations import count_operations
from linvit.heads.detection.detector import Detector
from linvit.heads.detection.vitdet_mask_rcnn import ViTDetMaskRCNN
from linvit.layers.relative_positions import DecomposedPositions
from linvit.layers.windows import WindowAttention

OPTIONS = {"window_size": 14, "decomposed_positions": True, "class_token": False, "final_norm": False}
HEAD = f"{ViTDetMaskRCNN.__module__}:{ViTDetMaskRCNN.__name__}"


def vitdet(**options: Any) -> Detector:
    """On ViT-B, for images of 1,024 pixels."""
    backbone = {"name": "deit_base", "global_pool": "avg", **OPTIONS, **options}
    return linvit.create_detector(backbone, HEAD, 80, img_size=1024)


def test_decomposed_positions_by_their_formula() -> None:
    torch.manual_seed(0)
    positions = DecomposedPositions((3, 4), 5).double()
    for table in positions.parameters():
        table.data.normal_()
    q = torch.randn(2, 12, 10, dtype=torch.float64)  # two heads
    bias = positions(q, 2, (3, 4))
    assert bias.shape == (2, 2, 12, 12)
    for query, key in ((0, 11), (7, 2), (5, 5)):
        rows, columns = query // 4 - key // 4, query % 4 - key % 4
        for head in (0, 1):
            vector = q[:, query, 5 * head : 5 * head + 5]
            expected = vector @ (positions.h[rows + 2] + positions.w[columns + 3])
            torch.testing.assert_close(bias[:, head, query, key], expected)
    longer = positions.resize_tables({"h": positions.h.data, "w": torch.randn(13, 5)}, lambda _: None)
    assert longer["h"] is positions.h.data or longer["h"].equal(positions.h)
    assert longer["w"].shape == (7, 5)


def test_four_blocks_see_the_whole_map() -> None:
    with torch.device("meta"):
        blocks = vitdet().backbone.blocks
    assert [not isinstance(block.attn, WindowAttention) for block in blocks] == [False, False, True] * 4
    with pytest.raises(UserError, match="window_size is for a network with class_token: false"):
        linvit.create_backbone({"name": "deit_tiny", "window_size": 7})


def test_the_official_names_load() -> None:
    small = {"embed_dim": 8, "depth": 4, "num_heads": 2, "name": "deit_tiny", "global_pool": "avg", **OPTIONS}
    model = linvit.create_detector(small, {"name": HEAD, "width": 8, "fc_width": 8}, 3, img_size=64)
    official = {name: torch.randn(shape) for name, shape in official_shapes(8, 4, 2, 8, 8, 3, 64).items()}
    report = linvit.load_pretrained(model, official)
    assert report.layout == "detectron2's ViTDet, deit"
    assert report.fraction == 1
    assert not report.missing
    assert not report.unexpected
    assert [*report.resized] == ["backbone.pos_embed"]  # of images of 224 pixels
    state = model.state_dict()
    assert state["neck.levels.0.4.norm.bias"].equal(official["backbone.simfp_2.4.norm.bias"])
    assert state["head.rpn.more.0.0.weight"].equal(official["proposal_generator.rpn_head.conv.conv1.weight"])


def test_parameters_are_detectron2s() -> None:
    """But for the positions, which detectron2 keeps for images of 224 pixels with a class token."""
    with torch.device("meta"):
        model = vitdet()
    count = lambda module: sum(parameter.numel() for parameter in module.parameters())  # noqa: E731
    official = sum(shape.numel() for shape in official_shapes(768, 12, 12, 256, 1024, 80, 1024).values())
    assert round(official / 1e6) == 111  # as in the paper
    assert count(model) == official + (64 * 64 - 14 * 14 - 1) * 768


class Layers(nn.Module):
    """All layers, with 1,000 boxes and 100 masks."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> None:
        head = self.detector.head
        features = self.detector._feature_maps(self.detector.backbone, images, self.detector.pyramid.indices)
        head.rpn(head.fpn(self.detector.through_neck(features)))
        head.stages[0].box_head(images.new_zeros(1000, 256, 7, 7))
        head.stages[0].mask_head(images.new_zeros(100, 256, 14, 14))


def test_a_layer_adds_them_to_the_logits() -> None:
    grid = linvit.Grid((3, 2))
    layer = linvit.AttentionLayer(8, 2, grid, attention="softmax", rel_pos_bias="decomposed").double()
    torch.manual_seed(0)
    for table in layer.rel_pos.parameters():
        nn.init.normal_(table)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    q, k, v = layer.qkv(x).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    bias = layer.rel_pos(q.transpose(1, 2).flatten(2), 2, grid.size)
    want = ((q @ k.mT / 2 + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x, grid), layer.proj(want), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_multiply_accumulates_are_the_papers() -> None:
    with torch.device("meta"):
        model = vitdet().eval()
    counted = count_operations(Layers(model), torch.zeros(1, 3, 1024, 1024, device="meta"))
    assert round(counted.matmul / 1e12, 1) == 0.8


def official_shapes(
    dim: int, depth: int, heads: int, width: int, fc_width: int, classes: int, side: int
) -> dict[str, torch.Size]:
    """The parameters of detectron2's mask_rcnn_vitdet with patches of 16 pixels."""
    found: dict[str, tuple[int, ...]] = {"backbone.net.pos_embed": (1, 197, dim)}

    def add(name: str, *shape: int, bias: bool = True, norm: bool = False) -> None:
        found[f"{name}.weight"] = shape
        out = shape[1] if "deconv" in name or shape[2:] == (2, 2) else shape[0]
        found.update({f"{name}.bias": (out,)} if bias else {})
        found.update({f"{name}.norm.weight": (out,), f"{name}.norm.bias": (out,)} if norm else {})

    add("backbone.net.patch_embed.proj", dim, 3, 16, 16)
    for i in range(depth):
        block, tokens = f"backbone.net.blocks.{i}", side // 16 if i % (depth // 4) == depth // 4 - 1 else 14
        for letter in "hw":
            found[f"{block}.attn.rel_pos_{letter}"] = (2 * tokens - 1, dim // heads)
        for name, shape in {
            "norm1": (dim,),
            "norm2": (dim,),
            "attn.qkv": (3 * dim, dim),
            "attn.proj": (dim, dim),
        }.items():
            add(f"{block}.{name}", *shape)
        add(f"{block}.mlp.fc1", 4 * dim, dim)
        add(f"{block}.mlp.fc2", dim, 4 * dim)
    add("backbone.simfp_2.0", dim, dim // 2, 2, 2)
    add("backbone.simfp_2.1", dim // 2)
    add("backbone.simfp_2.3", dim // 2, dim // 4, 2, 2)
    add("backbone.simfp_3.0", dim, dim // 2, 2, 2)
    for level, first, into in ((2, 4, dim // 4), (3, 1, dim // 2), (4, 0, dim), (5, 1, dim)):
        add(f"backbone.simfp_{level}.{first}", width, into, 1, 1, bias=False, norm=True)
        add(f"backbone.simfp_{level}.{first + 1}", width, width, 3, 3, bias=False, norm=True)
    for i in (0, 1):
        add(f"proposal_generator.rpn_head.conv.conv{i}", width, width, 3, 3)
    add("proposal_generator.rpn_head.objectness_logits", 3, width, 1, 1)
    add("proposal_generator.rpn_head.anchor_deltas", 12, width, 1, 1)
    for i in (1, 2, 3, 4):
        add(f"roi_heads.box_head.conv{i}", width, width, 3, 3, bias=False, norm=True)
        add(f"roi_heads.mask_head.mask_fcn{i}", width, width, 3, 3, bias=False, norm=True)
    add("roi_heads.box_head.fc1", fc_width, width * 49)
    add("roi_heads.box_predictor.cls_score", classes + 1, fc_width)
    add("roi_heads.box_predictor.bbox_pred", 4 * classes, fc_width)
    add("roi_heads.mask_head.deconv", width, width, 2, 2)
    add("roi_heads.mask_head.predictor", classes, width, 1, 1)
    return {name: torch.Size(shape) for name, shape in found.items()}
