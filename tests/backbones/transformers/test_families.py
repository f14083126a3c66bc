"""Each family of transformers with another attention."""

import copy

import pytest
import torch

import linvit
from linvit.backbones.transformers.hosts import FAMILIES, REPLACED, ReplacedTransformersAttention
from linvit.errors import UserError
from tests.backbones.transformers.families import MODELS, inputs_of, tiny, tokens, transformers


def test_each_family_of_the_table_has_a_model() -> None:
    assert {family.name for family in FAMILIES.values()} == {*MODELS}


@pytest.mark.parametrize("size", [(32, 32), (48, 24)])
@pytest.mark.parametrize("family", MODELS)
def test_softmax_put_in_is_sdpa(family: str, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = tiny(family, **({"image_size": size} if family == "VideoMAE" else {}))  # which takes that of its config
    assert model.config._attn_implementation == "sdpa"
    replaced = linvit.replace_attention(copy.deepcopy(model), "softmax")
    calls = []
    for module in replaced.modules():
        if isinstance(module, ReplacedTransformersAttention):
            module.mechanism.register_forward_hook(lambda *_: calls.append(1))
    inputs = inputs_of(family, size)
    torch.testing.assert_close(tokens(replaced, inputs), tokens(model, inputs), rtol=1e-5, atol=1e-5)
    assert len(calls) == 2


@pytest.mark.parametrize("attention", ["linear", "focused", "mlla", "soft"])
@pytest.mark.parametrize("family", MODELS)
def test_other_attentions_train(family: str, attention: str) -> None:
    torch.manual_seed(0)
    model = tiny(family)
    if attention != "linear" and family in ("ViTMAE", "VideoMAE"):
        with pytest.raises(UserError, match=r"looks at their places"):
            linvit.replace_attention(model, attention)
        return
    if attention == "mlla" and family == "DINOv3 ViT":
        with pytest.raises(UserError, match=r"would do it again"):
            linvit.replace_attention(model, attention)
        return
    linvit.replace_attention(model, attention).train()
    sizes = [(32, 32)] if family == "VideoMAE" else [(32, 32), (48, 24)]
    for size in sizes:
        model.zero_grad()
        tokens(model, inputs_of(family, size)).square().mean().backward()
        for name, parameter in model.named_parameters():
            if ".mechanism." in name or name.endswith(("qkv.weight", ".proj.weight")):
                assert parameter.grad is not None, name
                assert parameter.grad.abs().sum() > 0, name


OTHERS = [
    ("Data2VecVision", "positions are added"),
    ("Swinv2", "in windows"),
    ("Swin", "in windows"),
    ("Hiera", "in windows"),
    ("SamVision", "positions are added"),
    ("Pvt", "keys are reduced"),
    ("PvtV2", "keys are reduced"),
    ("Segformer", "keys are reduced"),
    ("Siglip2Vision", "several sizes"),
    ("PixtralVision", "several sizes"),
    ("Yolos", "detection tokens follow"),
    ("VJEPA2", "positions are added or turned"),
    ("Levit", "does not know it"),
]


@pytest.mark.parametrize(("name", "reason"), OTHERS)
def test_other_models_are_refused_with_the_reason(name: str, reason: str) -> None:
    with torch.device("meta"):
        network = getattr(transformers, f"{name}Model")._from_config(getattr(transformers, f"{name}Config")())
    with pytest.raises(UserError, match=rf"attention of {name}Model of transformers: .*{reason}.*Families .*DINOv2"):
        linvit.replace_attention(network, "linear")


def test_qwens_vision_is_refused() -> None:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    with torch.device("meta"):
        network = Qwen2_5_VisionTransformerPretrainedModel._from_config(Qwen2_5_VLVisionConfig(depth=1))
    with pytest.raises(UserError, match="images have several sizes"):
        linvit.replace_attention(network, "linear")


def test_what_a_mechanism_cannot_take_is_refused() -> None:
    with pytest.raises(UserError, match=r"rate 0.1.*attention_probs_dropout_prob of its config to 0"):
        linvit.replace_attention(tiny("ViT", attention_probs_dropout_prob=0.1), "linear")
    model = linvit.replace_attention(tiny("DINOv2"), "linear")
    images = torch.randn(1, 3, 32, 32)
    with pytest.raises(UserError, match="needs softmax's weights"):
        model(images, output_attentions=True)
    (layer, *_) = (module for module in model.modules() if isinstance(module, ReplacedTransformersAttention))
    for given in ({"attention_mask": torch.ones(1, 1, 17, 17)}, {"head_mask": torch.ones(2)}, {"is_causal": True}):
        with pytest.raises(UserError, match="takes no attention_mask"):
            layer(torch.randn(1, 17, 32), **given)
    for name in ("attention_mask", "head_mask"):
        with pytest.raises(UserError, match="takes no attention_mask"):
            model(images, **{name: torch.ones(1, 17)})
    model(images)
    with pytest.raises(UserError, match=r"18 tokens, but the last images .* have 4x4 patches and 1 prefix"):
        layer(torch.randn(1, 17 + 1, 32))


def test_a_text_tower_keeps_its_attention() -> None:
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision)).eval()
    inputs = {"input_ids": torch.tensor([[1, 2]]), "pixel_values": torch.randn(1, 3, 32, 32)}
    before = model(**inputs)
    student = linvit.linearize(model, "softmax")
    assert sum(isinstance(module, ReplacedTransformersAttention) for module in student.modules()) == 2
    torch.testing.assert_close(student(**inputs).logits_per_image, before.logits_per_image)
    student = linvit.linearize(model, "linear")
    torch.testing.assert_close(student(**inputs).text_embeds, before.text_embeds)


@pytest.mark.parametrize("size", [(32, 32), (48, 24)])
def test_a_bias_that_beits_blocks_share(size: tuple[int, int]) -> None:
    """Softmax gets it, beside those of the blocks; linear goes without both."""
    torch.manual_seed(0)
    model = tiny("BEiT", use_shared_relative_position_bias=True)
    inputs = inputs_of("BEiT", size)
    softmax, linear = (linvit.replace_attention(copy.deepcopy(model), name) for name in ("softmax", "linear"))
    torch.testing.assert_close(tokens(softmax, inputs), tokens(model, inputs), rtol=1e-5, atol=1e-5)
    before = tokens(linear, inputs)
    with torch.no_grad():
        model.shared_position_bias.relative_position_bias_table.add_(1)
        linear.shared_position_bias.relative_position_bias_table.copy_(torch.randn(52, 2))
    torch.testing.assert_close(tokens(linear, inputs), before, rtol=0, atol=0)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_a_mask_for_the_inner_model_is_refused(attention: str, shared: bool) -> None:
    """BEiT's blocks get it as part of their bias, which `linear` goes without."""
    config = tiny("BEiT", use_shared_relative_position_bias=shared).config
    model = transformers.BeitForImageClassification(config).eval()
    linvit.replace_attention(model, attention)
    images, mask = torch.randn(2, 3, 32, 32), torch.ones(2, 17)
    mask[:, 9:] = 0
    for each in (model, model.beit):
        with pytest.raises(UserError, match="takes no attention_mask"):
            each(images, attention_mask=mask)


def test_models_of_one_config_are_replaced_apart() -> None:
    """Each is saved with its own attention, and each refuses masks."""
    config = tiny("CLIP").config
    first, second, third = (transformers.CLIPVisionModel(config) for _ in range(3))
    for model, attention in ((first, "linear"), (second, "hedgehog")):
        linvit.replace_attention(model, attention)
        assert [each["attention"] for each in getattr(model.config, REPLACED)] == [attention]
        assert {id(m.config) for m in model.modules() if hasattr(m, "config")} == {id(model.config)}
        with pytest.raises(UserError, match="takes no attention_mask"):
            model(torch.randn(1, 3, 32, 32), attention_mask=torch.ones(1, 17))
    assert not hasattr(third.config, REPLACED)


def test_an_implementation_is_for_the_layers_that_keep_softmax() -> None:
    model, images = tiny("DINOv2"), torch.randn(1, 3, 32, 32)
    for attention, tolerance in ((["linear", None], 1e-5), ("linear", 0)):
        student = linvit.linearize(model, attention)
        before = tokens(student, {"pixel_values": images})
        student.set_attn_implementation("eager")
        assert {m.config._attn_implementation for m in student.modules() if hasattr(m, "config")} == {"eager"}
        torch.testing.assert_close(tokens(student, {"pixel_values": images}), before, rtol=0, atol=tolerance)
