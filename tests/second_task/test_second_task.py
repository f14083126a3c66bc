"""A second task, with a head and a data module of its own, through the command line as it is."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

import linvit as package
from linvit.runs.options import read_config
from linvit.runs.run import Run
from tests.cli.runs import events, files, flags, linvit
from tests.second_task.task import InkTask
from tests.training import SIDE, TINY, fit, tiny_task

CONFIG = """
model:
  class_path: tests.second_task.task.InkTask
  init_args: {backbone: {name: deit_nano, depth: 1}, attention: linear, lr: 2.0e-3, warmup_epochs: 0, ema_decay: 0.5}
data:
  class_path: tests.second_task.data.InkData
  init_args: {batch_size: 16, num_workers: 0, img_size: 16}
trainer: {accelerator: cpu, limit_train_batches: 10, limit_val_batches: 3, limit_test_batches: 3,
  limit_predict_batches: 3, log_every_n_steps: 1, enable_progress_bar: false, enable_model_summary: false}
"""
RUN = Path("checkpoints/ink/version_0")
BEST, LAST = RUN / "checkpoints" / "best_ema.ckpt", RUN / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the configuration, a run of two epochs and one more after it."""
    folder = tmp_path_factory.mktemp("second")
    (folder / "ink.yaml").write_text(CONFIG, encoding="utf-8")
    graphs = []

    def keep(graph, inputs):  # torch.compile without its compiler, which takes half a minute
        graphs.append(graph)
        return graph.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=keep))
        torch._dynamo.reset()
        compiled = flags(trainer__max_epochs=2, model__compile=True, model__grad_checkpointing=True)
        done = linvit("fit", "--config=ink.yaml", *compiled, cwd=folder)
        assert done.code == 0, done.err
        assert graphs
        done = linvit("fit", f"--config={RUN}/config.yaml", f"--ckpt_path={LAST}", "--trainer.max_epochs=3", cwd=folder)
        assert done.code == 0, done.err
    return folder


def scores(folder, verb, *arguments):
    done = linvit(
        verb, f"--config={RUN}/config.yaml", f"--ckpt_path={BEST}", "--model.compile=false", *arguments, cwd=folder
    )
    assert done.code == 0, done.err
    return done, {tag: float(value) for tag, value in re.findall(r"^  (\w+/\w+) +([\d.]+)$", done.out, re.MULTILINE)}


def test_it_trains_is_averaged_and_resumed(folder):
    curves = events(folder / RUN)
    assert [step for step, _ in curves["train/loss"]] == list(range(30))
    assert curves["train/loss"][-1][1] < 0.8 * curves["train/loss"][0][1]
    for tag in ("val/score", "val/ema_score", "val/loss", "val/ema_accuracy"):
        assert [step for step, _ in curves[tag]] == [9, 19, 29]
    state = torch.load(folder / LAST, weights_only=True)
    assert state["ema_updates"] == 30
    names = {"network.backbone.pos_embed", "network.head.weight", "ema.network.head.weight"}
    assert names <= state["state_dict"].keys()
    assert state["hyper_parameters"]["ink_weight"] == 1.0
    assert state["hyper_parameters"]["class_names"] == ["paper", "ink"]


def test_both_kinds_of_weights_are_scored(folder):
    done, found = scores(folder, "test")
    assert "48 images" in done.out
    tags = [f"test/{prefix}{name}" for prefix in ("", "ema_") for name in ("score", "accuracy", "loss")]
    assert list(found) == tags
    assert found["test/score"] == found["test/accuracy"] > 0.75  # 0.69 of the pixels are paper
    _, found = scores(folder, "validate")
    assert found["val/ema_score"] == pytest.approx(max(value for _, value in events(folder / RUN)["val/ema_score"]))


def test_it_predicts_with_a_writer_of_its_own(folder):
    done, _ = scores(folder, "predict", "--model.predict_with=ema")
    assert "predictions.csv" not in done.log
    rows = [line.split(",") for line in (folder / RUN / "ink.csv").read_text(encoding="utf-8").splitlines()]
    assert [row[0] for row in rows] == [str(i) for i in range(48)]
    assert 0.1 < sum(float(row[1]) for row in rows) / 48 < 0.6
    assert not [name for name in files(folder) if "classes" in name or "confusion" in name]


def test_it_is_loaded_and_predicts_through_the_same_door(folder):
    """As the run itself does, to the bit; its class is known, since this program has imported it."""
    options = {"ckpt_path": str(folder / BEST), "model.compile": False}
    run = Run.from_config(read_config(folder / RUN / "config.yaml", options), "predict")
    task, data = run.trained(), run.data
    data.setup("predict")
    batch = next(iter(data.predict_dataloader()))
    data.finish(batch)
    with torch.inference_mode():
        ink = task.predict_batch(task.ema.network, batch)["ink"]
    data.predict_set.reader.transform = lambda sample, seed: sample
    images = [data.predict_set[i]["image"] for i in range(len(ink))]
    model = package.load(folder / RUN, weights="ema")
    assert [result.ink for result in model(images)] == ink.tolist()
    Image.fromarray(images[0].permute(1, 2, 0).numpy()).save(folder / "digit.png")
    done = linvit("predict", "--model", RUN, "--weights=ema", "digit.png", "--output=out", cwd=folder)
    assert done.code == 0, done.err
    (saved,) = (folder / "out").rglob("digit.txt")
    assert saved.read_text(encoding="utf-8") == f"{model(folder / 'digit.png').ink:.4f}"


def test_the_help_is_of_the_task_and_the_data_that_the_configuration_names(folder):
    done = linvit("fit", "--config=ink.yaml", "--help", cwd=folder)
    assert done.code == 0, done.err
    for option in ("--model.ink_weight=1.0", "--model.lr=", "--data.rotate=10", "--data.source="):
        assert option in done.out
    assert "label_smoothing" not in done.out
    assert "augmentation" not in done.out


def test_its_mistakes_are_named_with_its_own_options(folder):
    done = linvit("fit", "--config=ink.yaml", "--model.ink_wieght=2", cwd=folder)
    assert done.code == 2
    assert "Did you mean --model.ink_weight?" in done.err


def ink_task(**options):
    torch.manual_seed(0)
    return InkTask(**{"backbone": TINY, "num_classes": 2, "img_size": SIDE, **options})


@pytest.mark.parametrize("ema", [False, True])
def test_its_backbone_starts_from_any_task(tmp_path, ema):
    """Of a classifier, and of its own kind."""
    first = tiny_task(ema_decay=0.5, lr=1e-2, warmup_epochs=0)
    fit(first, tmp_path).save_checkpoint(tmp_path / "first.ckpt")
    pretrained = {"source": str(tmp_path / "first.ckpt"), "ema": ema}
    task = ink_task(pretrained=pretrained)
    source = first.ema.network if ema else first.network
    assert torch.equal(task.network.backbone.pos_embed, source.pos_embed)
    torch.save({"state_dict": task.state_dict(), "hyper_parameters": {}}, tmp_path / "second.ckpt")
    again = ink_task(pretrained=str(tmp_path / "second.ckpt"))
    assert torch.equal(again.network.backbone.pos_embed, source.pos_embed)


def test_the_command_line_and_the_base_know_no_task():
    """The default, which help explains where there is no configuration, is named in one file."""
    root = Path(package.__file__).parent
    searched = [*(root / "runs").glob("*.py"), *(root / "cli" / "training").glob("*.py"), root / "tasks" / "base.py"]
    words = re.compile(r"classification|ClassReport|confusion|predictions\.csv|top1|smoothing", re.IGNORECASE)
    found = [path.name for path in searched if words.search(path.read_text(encoding="utf-8"))]
    assert found == ["command_line.py"]


def test_what_predicts_knows_no_task():
    files = [Path(package.__file__).parent / "inference" / f"{name}.py" for name in ("model", "preprocessing")]
    words = re.compile(r"(Classification|Segmentation|Detection|Feature)(Task|Result)|linvit\.tasks\.(?!base|results)")
    assert [path.name for path in files if words.search(path.read_text(encoding="utf-8"))] == []
