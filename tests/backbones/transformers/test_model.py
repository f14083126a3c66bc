"""The backbone `transformers`: the contract of timm's models on each family, and the verbs with `hf:FOLDER`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import linvit
from linvit import UserError
from linvit.advice.subject import find_subject
from linvit.analysis.probes import pooled_features
from linvit.analysis.recorder import observable, observe
from linvit.backbones.trained import trained_backbone
from linvit.backbones.transformers.model import TransformersBackbone, read_images
from linvit.linearization.distillation import Matching
from linvit.tasks import ClassificationTask
from linvit.tasks.parameter_groups import parameter_groups
from tests.backbones.transformers.families import MODELS, inputs_of, tiny, transformers
from tests.cli.runs import linvit as command
from tests.data.images import picture, save

IMAGES = [family for family in MODELS if family not in ("VideoMAE", "MetaCLIP 2")]  # AutoModel lacks the latter
PROCESSOR = {
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.2, 0.2, 0.3],
    "size": {"shortest_edge": 40},
}


def saved(family: str, folder: Path, **options: Any) -> Any:
    """A tiny model of a family, which is written to a folder."""
    torch.manual_seed(0)
    model = tiny(family, **options)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", IMAGES)
def test_features_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    model, known = saved(family, tmp_path), trained_backbone(f"hf:{tmp_path}")
    assert known is not None
    backbone: Any = known.build()
    for size in ((32, 32), (48, 24)):
        inputs = inputs_of(family, size)
        images = inputs["pixel_values"]
        count = size[0] * size[1] // 64
        if family == "ViTMAE":  # all patches, in their order
            model.config.mask_ratio, inputs["noise"] = 0.0, torch.arange(count).expand(2, -1)
        expected = model(**inputs, output_hidden_states=True)
        tokens, features = backbone.forward_intermediates(images, return_prefix_tokens=True)
        own = expected.last_hidden_state
        assert torch.equal(tokens, model.post_layernorm(own) if family == "CLIP" else own)
        pooled = {"SigLIP": "pooler_output", "CLIP": "pooler_output", "BEiT": "pooler_output"}.get(family)
        plain = own[:, 0] if backbone.num_prefix_tokens else own.mean(1)
        assert torch.equal(backbone(images), plain if pooled is None else expected[pooled])
        for (plane, prefix), state in zip(features, expected.hidden_states[1:], strict=True):
            assert plane.shape == (2, 32, size[0] // 8, size[1] // 8)
            assert torch.equal(torch.cat([prefix, plane.flatten(2).mT], 1), state)
    names = {feature for _, _, feature in pooled_features(backbone, images)}
    assert names == ({"mean", "class token"} if backbone.global_pool == "token" else {"mean"})
    assert backbone.prune_intermediate_layers(1) == [1]
    assert backbone.prune_intermediate_layers([0], prune_norm=True) == [0]
    backbone.forward_intermediates(images, indices=[0], intermediates_only=True)


def test_a_copy_without_hooks_gives_the_same_features(tmp_path: Path) -> None:
    saved("DINOv2", tmp_path)
    spec = {"name": "transformers", "model": str(tmp_path), "pretrained": True}
    network: Any = linvit.create_backbone(spec, "linear").eval()
    images = torch.randn(1, 3, 32, 48)
    last, features = network.forward_intermediates(images)
    again: Any = observable(network, 32)
    last_again, features_again = again.forward_intermediates(images)
    assert torch.equal(last_again, last)
    assert all(map(torch.equal, features_again, features))
    assert len(observe(network, images)) == 2


@pytest.mark.filterwarnings("error::FutureWarning")  # of what the next transformers will not have
@pytest.mark.parametrize("family", IMAGES)
def test_all_that_is_trained_gets_gradients(family: str, tmp_path: Path) -> None:
    saved(family, tmp_path)
    spec = {"name": "transformers", "model": str(tmp_path), "pretrained": True}
    network: Any = linvit.create_backbone(spec, ["linear", None], num_classes=3, img_size=48).train()
    assert all(module.training for module in network.modules())
    network.set_grad_checkpointing()
    network(torch.randn(2, 3, 48, 48)).sum().backward()
    unreached = {name for name, own in network.named_parameters() if own.requires_grad and own.grad is None}
    assert not unreached


def test_a_checkpoint_needs_no_folder(tmp_path: Path) -> None:
    saved("DINOv2", tmp_path / "model")
    known = trained_backbone(f"hf:{tmp_path / 'model'}")
    assert known is not None
    options = {"num_classes": 3, "img_size": 32}
    task = ClassificationTask(backbone=known.spec, attention="focused", **options).eval()
    (tmp_path / "model" / "config.json").unlink()
    again = ClassificationTask(backbone={**known.spec, "pretrained": False}, attention="focused", **options).eval()
    again.load_state_dict(task.state_dict())
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(again(images), task(images))
    rates = {group["lr"] for group in parameter_groups(task, 1.0, 0.05, layer_decay=0.5)}
    assert rates == {1.0, 0.5, 0.25, 0.125}  # classifier, last block and norm, first block, embeddings


@pytest.mark.parametrize(
    ("content", "images"),
    [
        (PROCESSOR, {"img_size": [32, 32], "crop_pct": 0.8, "crop_mode": "center"}),
        ({"size": {"height": 24, "width": 32}}, {"img_size": [24, 32], "crop_pct": 1.0, "crop_mode": "squash"}),
        ({"size": 224, "crop_size": 196, "do_center_crop": True}, {"img_size": [196, 196], "crop_pct": 0.875}),
        ({"image_processor": PROCESSOR}, {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.2, 0.3]}),
        ({"size": {"shortest_edge": 32}, "do_center_crop": False}, {}),
    ],
)
def test_images_are_prepared_as_the_processor_says(
    content: dict[str, Any], images: dict[str, Any], tmp_path: Path
) -> None:
    name = "processor_config.json" if "image_processor" in content else "preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps(content))
    found = read_images(str(tmp_path))
    assert images.items() <= found.items()
    assert images or not found


def test_verbs_take_a_folder(tmp_path: Path) -> None:
    saved("DINOv2", tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    for i in range(12):
        save(picture(i), tmp_path / "photos" / f"{i % 2}" / f"{i}.png")
    given = ["--model.attention=linear", "--data.source=photos", "--data.batch_size=4", "--data.num_workers=0"]
    given += ["--trainer.max_epochs=1", "--no_page"]
    done = command("linearize", "--teacher=hf:model", *given, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "image preparation of 'model': mean [0.4" in " ".join(done.out.split())
    run = tmp_path / "checkpoints/features/version_0"
    (tmp_path / "model").rename(tmp_path / "gone")
    trained = linvit.load(run)
    assert (trained.preprocessing.mean, trained.preprocessing.crop_pct) == ([0.4, 0.5, 0.6], 0.8)
    images = torch.randn(2, 3, 32, 48)
    assert torch.equal(linvit.load_transformers(run / "student")(images).pooler_output, trained.network(images))
    (tmp_path / "gone").rename(tmp_path / "model")
    with pytest.raises(UserError, match=r"is a student, which linvit.load_transformers"):
        linvit.create_backbone({"name": "transformers", "model": str(run / "student")})
    labelled = ["--data.source=photos", "--data.labels=true", "--neighbours", "2"]
    probed = command("probe", "hf:model", str(run), *labelled, cwd=tmp_path)
    assert probed.code == 0, probed.err
    assert probed.out.count("class token") >= 4  # two layers of two networks
    shown = ["--backbone=hf:model", "--attention=softmax", "--images=photos", "--count=1"]
    analysed = command("analyze", *shown, cwd=tmp_path)
    assert analysed.code == 0, analysed.err
    assert "hosted.encoder.layer.1.attention" in (tmp_path / "analysis" / "statistics.csv").read_text()
    subject = find_subject(f"hf:{tmp_path / 'model'}")
    assert (subject.own, subject.multiple, subject.images["crop_pct"]) == ((32, 32), 8, 0.8)
    network = subject.with_attention(subject.build((48, 32)), "linear", (48, 32))
    assert network(torch.randn(1, 3, 48, 32)).shape == (1, 32)


@pytest.mark.slow
@pytest.mark.parametrize("family", IMAGES)
def test_three_steps_of_linearize(family: str, tmp_path: Path) -> None:
    saved(family, tmp_path / "model", attention_dropout=0.0)
    for i in range(12):
        save(picture(i), tmp_path / "photos" / f"{i}.png")
    given = ["--model.attention=[linear, null]", "--data.source=photos", "--data.img_size=[48, 32]", "--no_page"]
    given += ["--data.batch_size=4", "--data.num_workers=0", "--data.val_fraction=0.25", "--trainer.max_epochs=1"]
    given += ["--model.grad_checkpointing=true", "--model.teacher.attention_inputs=student"]
    done = command("linearize", "--teacher=hf:model", *given, cwd=tmp_path)
    assert done.code == 0, done.err
    run = tmp_path / "checkpoints/features/version_0"
    trained: Any = linvit.load(run).network
    student = linvit.load_transformers(run / "student").state_dict()
    expected = dict(trained.hosted.state_dict())
    expected |= {f"{trained.norm_name}.{name}": own for name, own in trained.norm.state_dict().items()}
    assert student.keys() == expected.keys()
    assert all(torch.equal(own, expected[name]) for name, own in student.items())


def test_attention_on_the_teachers_inputs_is_compared() -> None:
    """A layer of transformers returns a pair."""
    torch.manual_seed(0)
    teacher = tiny("DINOv3 ViT")
    matching = Matching(attention_inputs="teacher")
    distillation = linvit.Distillation(teacher, linvit.linearize(teacher, "softmax"), matching)
    assert max(distillation.distances(torch.randn(1, 3, 32, 48))["attention"].values()) < 1e-9


def test_what_is_no_vision_transformer_is_refused(tmp_path: Path) -> None:
    def refused(**options: Any) -> str:
        with pytest.raises(UserError) as error:
            linvit.create_backbone({"name": "transformers", "model": str(tmp_path), **options})
        return str(error.value)

    assert "has no config of transformers" in refused()
    saved("VideoMAE", tmp_path)
    assert "takes videos, and linvit images" in refused()
    saved("ViT", tmp_path)
    assert "has no stochastic depth" in refused(drop_path_rate=0.1)
    assert "transformers cannot build" in refused(pretrained=True, in_chans=4)
    transformers.ResNetConfig(hidden_sizes=[8, 8, 8, 8], embedding_size=8, depths=[1, 1, 1, 1]).save_pretrained(
        tmp_path
    )
    assert "cannot replace the attention of ResNetModel" in refused()


def test_both_towers_of_a_model_are_saved_and_the_vision_is_taken(tmp_path: Path) -> None:
    own = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=own)).eval()
    model.save_pretrained(tmp_path)
    known = trained_backbone(f"hf:{tmp_path}")
    assert known is not None
    network, images = known.build(), torch.randn(1, 3, 32, 32)
    assert isinstance(network, TransformersBackbone)
    assert torch.equal(network(images), model.vision_model(images).pooler_output)
