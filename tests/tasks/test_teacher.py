"""A task that learns from a teacher: what it copies, matches, saves, and refuses."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import linvit
from linvit import UserError
from linvit.callbacks import SaveCheckpoints
from linvit.data import ClassificationData
from linvit.experiments.hybrids.run import _Images
from linvit.registry import attention_kernels
from linvit.tasks import ClassificationTask, DetectionTask, FeatureTask, SegmentationTask
from linvit.tasks.teacher import Teacher
from tests.data.images import picture, save
from tests.training import CLASSES, SIDE, TINY, Memory, batches, fit, tiny_task, trainer

STUDENT: dict[str, Any] = {"attention": "linear", "warmup_epochs": 0}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A checkpoint of a task with softmax, after two steps."""
    task = tiny_task(ema_decay=0.5, predict_with="ema")
    runner = fit(task, tmp_path_factory.mktemp("teacher"))
    path = tmp_path_factory.getbasetemp() / "teacher.ckpt"
    runner.save_checkpoint(path)
    return str(path)


def started(task, folder):
    """A task as a run starts it, without a step."""
    runner = trainer(folder, max_steps=0, max_epochs=1)
    runner.fit(task, batches(8))
    return task


def distance_of(task):
    """What compares a task with its teacher, which is loaded."""
    task.distillation.load(task)
    return task.distillation.distance


@pytest.mark.parametrize("copied", ["all", "attention", "nothing"])
def test_the_student_starts_with_what_is_copied_of_the_weights_that_predict(teacher, tmp_path, copied):
    mine = tiny_task(**STUDENT, ema_decay=0.9, mesa=1.0, teacher={"source": teacher, "copied": copied})
    before = {name: value.clone() for name, value in mine.network.state_dict().items()}
    theirs = ClassificationTask.load_from_checkpoint(teacher).ema.network.state_dict()
    started(mine, tmp_path)
    for name, value in mine.network.state_dict().items():
        taken = copied == "all" or (copied == "attention" and ".attn." in name)
        assert torch.equal(value, theirs[name] if taken else before[name]), name
        assert torch.equal(mine.ema.network.state_dict()[name], value)


def test_a_kernel_of_the_student_needs_none_of_the_teacher(teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(attention_kernels, "_registered", {})
    linvit.register_attention_kernel("students")(lambda *_: None)
    task = tiny_task(**STUDENT, attention_kernel="students", teacher=teacher)
    kinds = {module.attention_kernel for module in task.modules() if hasattr(module, "attention_kernel")}
    assert kinds == {"students"}
    assert distance_of(task).layers


def test_a_student_with_the_attention_of_its_teacher_is_told_so(teacher, tmp_path, recwarn):
    started(tiny_task(**STUDENT, teacher=teacher), tmp_path)
    assert not [warning for warning in recwarn if "nothing is converted" in str(warning.message)]
    with pytest.warns(UserWarning, match=r'its teacher\'s attention, {"name": "softmax"}, in every layer: nothing is'):
        started(tiny_task(**STUDENT | {"attention": {"name": "softmax"}}, teacher=teacher), tmp_path)


def test_the_loss_is_the_weighted_sum_and_its_parts_are_logged(teacher, tmp_path):
    weights = {"attention_weight": 3.0, "block_weight": 2.0, "feature_weight": 0.5, "logit_weight": 0.25}
    task = tiny_task(**STUDENT, teacher={"source": teacher, "task_weight": 0.1, **weights})
    seen, memory = [], Memory()
    plain = task.training_loss
    task.training_loss = lambda batch: seen.append(plain(batch)) or seen[-1]
    fit(task, tmp_path, logger=memory)
    logged = {tag: [value for _, value in values] for tag, values in memory.values.items()}
    for step, loss in enumerate(logged["train/loss"]):
        parts = [logged[f"train/teacher_{part}"][step] for part in ("attention", "blocks", "features", "logits")]
        assert all(part > 0 for part in parts)
        expected = 0.1 * seen[step].item() + sum(w * part for w, part in zip(weights.values(), parts, strict=True))
        assert loss == pytest.approx(expected, rel=1e-5)


def test_the_teacher_stays_as_it_is_and_outside(teacher, tmp_path):
    task = tiny_task(**STUDENT, teacher=teacher)
    alone = tiny_task(**STUDENT)
    found = {}

    def look(*_):
        network = task.distillation.distance.teacher
        found.setdefault("weights", {name: value.clone() for name, value in network.state_dict().items()})
        found["same"] = all(torch.equal(found["weights"][n], value) for n, value in network.state_dict().items())
        found["trained"] = sum(len(group["params"]) for group in task.optimizers().param_groups)

    task.on_train_batch_end = look
    runner = fit(task, tmp_path)
    assert found["same"]
    assert found["trained"] == len(list(alone.parameters()))
    runner.save_checkpoint(tmp_path / "student.ckpt")
    assert torch.load(tmp_path / "student.ckpt", weights_only=True)["state_dict"].keys() == alone.state_dict().keys()
    loaded = ClassificationTask.load_from_checkpoint(tmp_path / "student.ckpt").eval()  # without the teacher's file
    images = torch.randn(2, 3, SIDE, SIDE)
    assert torch.equal(loaded(images), task.eval()(images))


def test_a_resumed_run_wants_the_teacher_that_it_had(teacher, tmp_path):
    def run(source=teacher, **options):
        task = tiny_task(**STUDENT, lr=1e-2, teacher=source)
        kept = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, every_n_epochs=1)
        runner = trainer(tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[kept])
        runner.fit(task, batches(16), **options)
        return task.network.state_dict()

    whole, half = run(), {"ckpt_path": tmp_path / "epoch=0.ckpt", "weights_only": True}
    torch.testing.assert_close(run(**half), whole, rtol=0, atol=0)
    other = fit(tiny_task(lr=0.1), tmp_path)
    other.save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="learned from another teacher"):
        run(str(tmp_path / "other.ckpt"), **half)


def test_without_labels_only_what_is_matched_is_trained(teacher, tmp_path):
    option = {"source": teacher, "task_weight": 0, "attention_inputs": "teacher"}
    task = started(tiny_task(**STUDENT, teacher=option), tmp_path)
    before = {name: value.clone() for name, value in task.network.state_dict().items()}
    task = tiny_task(**STUDENT, lr=0.1, teacher=option)
    task.training_loss = None
    fit(task, tmp_path)
    assert {n for n, own in task.network.named_parameters() if own.requires_grad} == {
        "blocks.0.attn.qkv.weight",
        "blocks.0.attn.qkv.bias",
    }  # else DDP would wait for gradients of the others
    changed = {n for n, value in task.network.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {"blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias"}


def test_null_in_a_list_keeps_the_attention_of_the_teacher(tmp_path):
    deep, path = {**TINY, "depth": 2}, str(tmp_path / "teacher.ckpt")
    trained = fit(tiny_task(backbone=deep, attention=["focused", "hydra"]), tmp_path)
    trained.save_checkpoint(path)
    theirs = trained.lightning_module.network
    student = started(tiny_task(backbone=deep, attention=[None, "linear"], teacher=path), tmp_path)
    assert student.hparams["attention"] == ["focused", "linear"]
    for name, value in theirs.blocks[0].state_dict().items():
        assert torch.equal(student.network.blocks[0].state_dict()[name], value), name
    assert type(student.network.blocks[1].attn.mechanism) is not type(theirs.blocks[1].attn.mechanism)
    with pytest.raises(UserError, match=r'lists 3 and the teacher has 2: \["focused", "hydra"\]'):
        tiny_task(backbone={**TINY, "depth": 3}, attention=["linear", None, None], teacher=path)


def test_a_teacher_of_other_classes_is_named_and_its_features_are_used(teacher, tmp_path):
    task = tiny_task(**STUDENT, num_classes=CLASSES + 1, teacher=teacher)
    with pytest.warns(UserWarning, match=rf"head\.weight .*{CLASSES} classes.*its score says little"):
        assert distance_of(task).layers


def test_the_teacher_has_the_precision_of_the_run(teacher, tmp_path):
    task, memory = tiny_task(**STUDENT, teacher=teacher), Memory()
    fit(task, tmp_path, precision="bf16-true", logger=memory)
    assert all(0 < value < 1 for _, value in memory.values["train/teacher_attention"])


def test_new_parameters_have_a_learning_rate_of_their_own(teacher, tmp_path):
    task = tiny_task(attention="focused", lr=1e-3, new_lr_scale=20.0, warmup_epochs=0, teacher=teacher)
    peaks = {}
    task.on_train_batch_start = lambda *_: peaks.update(
        {id(p): group["peak_scale"] for group in task.optimizers().param_groups for p in group["params"]}
    )
    fit(task, tmp_path)
    ratio = {name: peaks[id(p)] for name, p in task.network.named_parameters()}
    new = {name for name, value in ratio.items() if value == pytest.approx(20)}
    assert new == {name for name in ratio if ".mechanism." in name}
    assert all(value == pytest.approx(1) for name, value in ratio.items() if name not in new)
    with pytest.raises(UserError, match=r"set --model\.teacher"):
        fit(tiny_task(new_lr_scale=2.0), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": None}, r"needs another attention than its teacher's: set --model\.attention"),
        ({"teacher": {"source": None}}, r"has no trained weights: .*--model\.teacher\.source=FILE"),
        ({"teacher": {"source": "missing.ckpt"}}, r"checkpoint 'missing\.ckpt' does not exist"),
        (
            {"backbone": {**TINY, "depth": 2}},
            r"is not of the backbone .*blocks\.1\.attn\.proj\.weight \(not in the file",
        ),
        (
            {"backbone": {**TINY, "embed_dim": 48}},
            r"in the file, 48x48 in the model\)\. Set --model\.backbone to .*, \{",
        ),
        ({"num_classes": CLASSES + 1, "teacher": {"logit_weight": 1.0}}, "has no logits to match; set logit_weight: 0"),
    ],
)
def test_what_is_no_teacher_is_refused_in_one_sentence(teacher, tmp_path, options, message):
    given = {"source": teacher, **options.pop("teacher", {})}
    with pytest.raises(UserError, match=message) as refused:
        started(tiny_task(**{**STUDENT, **options}, teacher=given), tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"weight": 3}, r"an option of teacher .*'weight'"),
        ({"copied": "some"}, "copied"),
        ({"attention_weight": -1}, "attention_weight"),
        ({"task_weight": 0, "attention_weight": 0}, "nothing is learned"),
    ],
)
def test_options_are_checked(option, message):
    with pytest.raises(UserError, match=message):
        Teacher.of(option)


DENSE = {"backbone": {"name": "pvt_v2_b0", "embed_dims": [8, 8, 8, 8], "num_heads": [1, 1, 1, 1], "depths": [1] * 4}}
DENSE |= {"num_classes": 3, "img_size": 64}
PIXELS = {"image": torch.randn(2, 3, 64, 64), "mask": torch.ones(2, 64, 64, dtype=torch.uint8)}
BOXES = {
    "image": [torch.randn(3, 64, 64), torch.randn(3, 50, 40)],
    "boxes": [torch.tensor([[4.0, 4.0, 30.0, 30.0]])] * 2,
    "labels": [torch.tensor([1])] * 2,
}


@pytest.mark.parametrize(
    ("kind", "head", "batch"), [(SegmentationTask, "semantic_fpn", PIXELS), (DetectionTask, "retinanet", BOXES)]
)
def test_dense_tasks_learn_from_a_teacher_of_their_own(tmp_path, kind, head, batch):
    trained = kind(**DENSE, head=head)
    torch.save({"state_dict": trained.network.state_dict()}, tmp_path / "teacher.pth")
    for task_weight in (1.0, 0.0):
        option = {"source": str(tmp_path / "teacher.pth"), "feature_weight": 1.0, "task_weight": task_weight}
        student = kind(**DENSE, head=head, attention="linear", teacher=option)
        distillation = distance_of(student)
        assert len(distillation.layers) == 4
        if task_weight:
            assert student.training_loss(batch).isfinite()
        else:
            distillation.run(batch["image"])
        parts = distillation.parts()
        assert parts.keys() == {"attention", "features"}
        assert all(value > 0 for value in parts.values())


@pytest.mark.parametrize(("kind", "head"), [(SegmentationTask, "semantic_fpn"), (DetectionTask, "retinanet")])
def test_validation_images_of_several_sizes_are_compared_and_searched(tmp_path, monkeypatch, kind, head):
    torch.save({"state_dict": kind(**DENSE, head=head).network.state_dict()}, tmp_path / "teacher.pth")
    student = kind(**DENSE, head=head, attention="linear", teacher=str(tmp_path / "teacher.pth"))
    student.trainer, logged = trainer(tmp_path), {}
    monkeypatch.setattr(student, "log_dict", lambda values, **_: logged.update(values))
    distance_of(student)
    student.distillation.validate(student, BOXES, 0)
    assert len(logged) == 4
    (images,) = _Images(ClassificationData("digits"), lambda: [dict(BOXES)])
    assert images.shape == (2, 3, 64, 64)
    assert not images[1, :, 50:].any()


def test_scores_and_distances_before_any_step_are_in_the_curves(teacher, tmp_path):
    images, memory = batches(24), Memory()
    start = started(tiny_task(**STUDENT, teacher=teacher), tmp_path)
    task = tiny_task(**STUDENT, teacher=teacher)
    expected = distance_of(task).distances(next(iter(images))["image"])["attention"]["blocks.0.attn"]
    learning = trainer(tmp_path, logger=memory, num_sanity_val_steps=1, max_epochs=2)
    learning.fit(tiny_task(**STUDENT, lr=1e-2, teacher=teacher), batches(16), images)
    logged, runner = memory.values, trainer(tmp_path)
    (validated,) = runner.validate(start, images, verbose=False)
    assert logged["start/score"] == [(0, pytest.approx(validated["val/score"]))]
    (validated,) = runner.validate(ClassificationTask.load_from_checkpoint(teacher), images, verbose=False)
    assert logged["teacher/score"] == [(0, pytest.approx(validated["val/ema_score"]))]
    assert logged["start/distance/blocks.0.attn"] == [(0, pytest.approx(expected))]
    assert len(logged["distance/blocks.0.attn"]) == len(logged["val/score"]) == 2  # of two epochs


def test_a_resumed_student_does_not_start_again_in_the_curves(teacher, tmp_path):
    images, memories = batches(24), (Memory(), Memory())
    last = tmp_path / "memory" / "version_0" / "checkpoints" / "last.ckpt"
    for memory, epochs, resumed in zip(memories, (1, 2), (None, last), strict=True):
        options = {"enable_checkpointing": True, "callbacks": [SaveCheckpoints()], "num_sanity_val_steps": 1}
        learning = trainer(tmp_path, logger=memory, max_epochs=epochs, **options)
        task = tiny_task(**STUDENT, lr=1e-2, teacher=teacher)
        learning.fit(task, batches(16), images, ckpt_path=resumed, weights_only=True)
    before, after = (memory.values for memory in memories)
    assert after["teacher/score"] == before["teacher/score"]
    assert [len(before[tag]) for tag in ("start/score", "start/distance/blocks.0.attn")] == [1, 1]
    assert [tag for tag in after if tag.startswith("start/")] == []


def test_features_are_learned_and_scored_without_labels(tmp_path):
    (tmp_path / "photos").mkdir()
    for number in range(20):
        save(picture(number, 20, 24), tmp_path / "photos" / f"{number}.png")
    data = ClassificationData(str(tmp_path / "photos"), labels=False, batch_size=4, num_workers=0, img_size=16)
    source = str(tmp_path / "teacher.pth")
    torch.save(tiny_task().network.state_dict(), source)
    option = {"source": source, "task_weight": 0, "feature_weight": 1.0}
    task = FeatureTask(backbone=TINY, attention="linear", img_size=16, num_classes=data.num_classes, teacher=option)
    runner = trainer(tmp_path, max_epochs=1)
    runner.fit(task, datamodule=data)
    during = runner.callback_metrics["val/score"]
    (after,) = trainer(tmp_path).validate(task, datamodule=data, verbose=False)  # the teacher is loaded for it
    assert after["val/score"] == pytest.approx(during.item())
    assert 0 < after["val/score"] < 1
    with pytest.raises(UserError, match="learns from a teacher alone"):
        fit(FeatureTask(backbone=TINY, img_size=16), tmp_path)
