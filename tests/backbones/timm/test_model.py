"""timm's models as backbones: classes, sizes, pyramids, and the error for a name that timm does not have."""

import pytest
import timm
import torch

import linvit
from linvit import UserError
from tests.helpers import randn


def build(model: str, **options: object) -> torch.nn.Module:
    own = {key: options.pop(key) for key in ("features_only", "out_indices", "pretrained") if key in options}
    torch.manual_seed(0)
    return linvit.create_backbone({"name": "timm", "model": model, **own}, **options).eval()


@torch.no_grad()
def test_resnet_is_timms_own() -> None:
    model = build("resnet18", num_classes=10, img_size=64)
    assert type(model) is type(timm.create_model("resnet18"))
    assert model(randn(2, 3, 64, 64, dtype=torch.float32)).shape == (2, 10)
    assert model.num_classes == 10


@torch.no_grad()
@pytest.mark.parametrize("size", [96, (96, 64), [32, 48]])
def test_transformer_of_a_fixed_size_is_built_for_the_given_one(size: object) -> None:
    height, width = (size, size) if isinstance(size, int) else size
    model = build("test_vit", num_classes=4, img_size=size)
    assert model(randn(2, 3, height, width, dtype=torch.float32)).shape == (2, 4)
    assert model.pos_embed.shape[1] == model.num_prefix_tokens + height * width // 16**2


@torch.no_grad()
def test_pyramid() -> None:
    model = build("resnet18", features_only=True, img_size=64)
    levels = model(randn(1, 3, 64, 96, dtype=torch.float32))
    assert model.feature_info.channels() == [64, 64, 128, 256, 512]
    assert model.feature_info.reduction() == [2, 4, 8, 16, 32]
    shapes = [(1, c, 64 // r, 96 // r) for c, r in zip([64, 64, 128, 256, 512], [2, 4, 8, 16, 32], strict=True)]
    assert [tuple(level.shape) for level in levels] == shapes


def test_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"timm \S+ has no model 'resnet19'. Did you mean 'resnet1\d"):
        build("resnet19")
    with pytest.raises(UserError, match=r"has no model 'zzz'\. All names: python -c"):
        build("zzz")


def test_model_is_required() -> None:
    with pytest.raises(linvit.UserError, match="backbone 'timm' needs model"):
        linvit.create_backbone("timm")


def test_attention_is_the_models_own_unless_another_is_named() -> None:
    assert type(build("test_vit", img_size=32).blocks[0].attn) is timm.layers.Attention
    model = build("test_vit", img_size=32, attention="hydra")
    assert type(model.blocks[0].attn.mechanism).__name__ == "HydraAttention"
