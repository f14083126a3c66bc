"""Maps of a query token: rows of the matrix, shares in the output, rollout, and their places in the image."""

from typing import Any

import pytest
import timm
import torch

import linvit
from linvit import UserError
from linvit.analysis.maps import Query, query_map, rollout
from linvit.analysis.recorder import observable, observe
from tests.helpers import perturb, randn

SWIN = {"embed_dim": 24, "depths": [2, 2, 1, 1], "num_heads": [1, 2, 4, 8]}
CSWIN = {"embed_dim": 16, "depths": [2, 2, 2, 1], "num_heads": [2, 4, 8, 16]}


def calls_of(attention: Any, backbone: str = "deit_nano", side: int = 32, **options: Any) -> dict[str, Any]:
    model = perturb(linvit.create_backbone(backbone, attention=attention, num_classes=0, img_size=side, **options))
    return observe(model.eval().double(), randn(1, 3, side, side))


@pytest.mark.parametrize(
    "name",
    ["softmax", "hydra", "focused", "enhanced_linear", "linear_angular", "additive", "inline", "nystrom"],
)
def test_a_map_is_the_row_of_the_matrix_and_the_share_in_the_output(name: str) -> None:
    call = calls_of(name)["blocks.1.attn"]
    found = query_map(call, Query(0.3, 0.9))  # row 2, column 7 of 8 x 8
    matrix = call.first().matrix()  # (h', N, N), or (h, d, N, N)
    row = matrix[..., 2 * 8 + 7, :]
    want = row.flatten(0, -2).mean(0).view(8, 8)
    torch.testing.assert_close(found.weights, want, rtol=1e-9, atol=1e-12)
    assert not found.is_class
    if len(matrix) != call.mechanism.num_heads:  # several scales
        assert found.focus is None
        return
    row = row if row.ndim == 3 else row.unsqueeze(1)  # (h, d, N) or (h, 1, N)
    parts = row.mT * call.v[0].double()  # (h, N, d): g_t
    output = parts.sum(1)
    if call.mechanism.facts.linear_in_values:
        extra = {} if call.x is None else {"x": call.x.double()}
        q, k, v = (x.double() for x in (call.q, call.k, call.v))
        whole, zero = (call.mechanism.double().forward(q, k, values, call.grid, **extra) for values in (v, 0 * v))
        torch.testing.assert_close(output, (whole - zero)[0, :, 23], rtol=1e-9, atol=1e-12)
    focus = torch.einsum("hnd,hd->n", parts, output) / output.square().sum()
    torch.testing.assert_close(found.focus, focus.view(8, 8), rtol=1e-9, atol=1e-12)
    assert found.focus is not None
    assert found.focus.sum().item() == pytest.approx(1)


def test_the_class_token_looks_where_there_is_one() -> None:
    call = calls_of("softmax", "deit_tiny", depth=1, embed_dim=24, patch_size=8)["blocks.0.attn"]
    found = query_map(call, Query())
    assert found.is_class
    torch.testing.assert_close(found.weights, call.matrix()[:, 0, 1:].mean(0).view(4, 4))
    assert not query_map(call, Query(0.5, 0.5)).is_class


@pytest.mark.parametrize(
    ("backbone", "options"),
    [("swin_tiny", {**SWIN, "window_size": 4}), ("cswin_tiny", {**CSWIN, "split_size": [1, 2, 4, 2]})],
    ids=["swin", "cswin"],
)
def test_a_window_is_drawn_where_it_lies(backbone: str, options: dict[str, Any]) -> None:
    """The input is 0 but for the window of the query, so its map must be where the query is, and 0 elsewhere."""
    calls = calls_of("softmax", backbone, 64, **options)
    windowed = {layer: call for layer, call in calls.items() if len(call.q) > 1}
    assert any("blocks.1" in layer for layer in windowed)  # shifted
    for call in windowed.values():
        (height, width), places = call.layout
        for query in (Query(0, 0), Query(0.99, 0.3)):
            row, column = query.patch((height, width))
            weights = query_map(call, query).weights
            assert weights.shape == (height, width)
            assert weights.sum().item() == pytest.approx(1)
            (own,) = [window for window in places.tolist() if row * width + column in window]
            assert set(weights.flatten().nonzero().flatten().tolist()) <= set(own)


def test_rollout_is_the_product_of_the_layers() -> None:
    calls = calls_of("softmax")
    product = torch.eye(64, dtype=torch.double)
    for call in calls.values():
        product = (0.5 * call.matrix().mean(0) + 0.5 * torch.eye(64, dtype=torch.double)) @ product
    found = rollout(calls, Query(0.5, 0.5))
    torch.testing.assert_close(found, product[4 * 8 + 4].view(8, 8), rtol=1e-9, atol=1e-12)
    assert found.sum().item() == pytest.approx(1)
    assert rollout(calls_of("focused"), Query()).sum().item() == pytest.approx(1)
    with pytest.raises(UserError, match=r"must be of all tokens of the image; stages\.0\.blocks\.0\.attn has windows"):
        rollout(calls_of("softmax", "swin_tiny", 64, **SWIN), Query())


@pytest.mark.parametrize("name", ["test_vit", "test_vit3", "pvt_v2_b0", "swin_tiny_patch4_window7_224"])
def test_timms_own_attention_is_observed_and_its_model_left_alone(name: str) -> None:
    small = {"depths": (1, 1, 1, 1), "embed_dim": 24, "num_heads": (1, 1, 1, 1)} if name.startswith("swin") else {}
    model = timm.create_model(name, pretrained=False, num_classes=5, **small).eval()
    side = model.default_cfg["input_size"][1]
    image, before = torch.randn(1, 3, side, side), str(model)
    found = observe(model, image)
    assert str(model) == before
    assert all(call.mechanism.__class__.__name__ == "SoftmaxAttention" for call in found.values())
    torch.testing.assert_close(observable(model, side)(image), model(image), rtol=1e-4, atol=1e-5)
    call = next(iter(found.values()))
    if name.startswith("swin"):
        with pytest.raises(UserError, match="windows have no known positions in the image, as in timm's Swin"):
            query_map(call, Query())
    else:
        assert query_map(call, Query()).weights.shape == call.grid.keys_size


def test_what_timm_has_besides_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="mixes tokens by MultiScaleAttention"):
        observe(timm.create_model("mvitv2_tiny"), torch.zeros(1, 3, 224, 224))


def test_a_copy_shares_the_weights_and_none_of_the_hooks() -> None:
    model = linvit.create_backbone("deit_nano").train()
    model.blocks[0].register_forward_hook(lambda *_: pytest.fail("a hook of somebody else"))
    model.compile()
    copied = observable(model, 32)
    assert all(a is b for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    assert model.training
    assert not copied.training
    assert torch.isfinite(copied(torch.zeros(1, 3, 32, 32))).all()
