"""`linvit linearize`: from a run to a student with its page, and what is refused."""

import shlex
import subprocess
import sys

import pytest
import timm
import torch
import yaml

from linvit import UserError
from linvit.cli.linearize import with_teacher
from linvit.experiments import linearize
from linvit.experiments.bench.costs import crossover
from linvit.experiments.hybrids.blocks import Blocks
from linvit.runs.folder import RunFolder
from linvit.runs.resolve import find_teacher
from linvit.runs.run import Run
from linvit.runs.train_teacher import train_teacher
from linvit.tasks import Teacher
from tests.cli.runs import QUICKSTART, linvit, tiny
from tests.data.images import picture, save
from tests.experiments.compare.runs import write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which a run with softmax was trained and another one has become linear."""
    root = tmp_path_factory.mktemp("linearize")
    shorter = tiny(model__attention="softmax", model__backbone="{name: deit_nano, depth: 4, embed_dim: 24}")
    linvit("fit", f"--config={QUICKSTART}", *shorter, cwd=root)
    teacher = "checkpoints/quickstart/version_0"
    given = [f"--teacher={teacher}", "--trainer.max_epochs=1", "--model.lr=1e-4"]
    given += ["--model.attention=[linear, null, null, linear]"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linearize, "SECONDS", 0.2)
        done = linvit("linearize", *given, cwd=root)
        page = root / "checkpoints" / "quickstart" / "version_1" / "linearize.html"
        written = page.stat().st_mtime_ns
        again = linvit("linearize", *given, "--resume=auto", cwd=root)
    assert done.code == again.code == 0, done.err
    assert "is finished already" in again.log
    assert page.stat().st_mtime_ns == written
    assert again.out == done.out[-len(again.out) :]  # where the page is
    return root, done.out


def test_a_run_becomes_linear_and_has_a_page(folder):
    root, said = folder
    student = root / "checkpoints" / "quickstart" / "version_1"
    assert "linearize.html" in said
    config = yaml.safe_load((student / "config.yaml").read_text(encoding="utf-8"))["model"]["init_args"]
    assert config["attention"] == ["linear", "softmax", "softmax", "linear"]  # null was the teacher's
    assert config["teacher"]["source"] == "checkpoints/quickstart/version_0/checkpoints/best.ckpt"
    run = RunFolder(student)
    found = linearize.scores([run])
    assert [*found] == ["teacher", "student before any step", "student after epoch 1, the last"]
    errors = linearize.errors([run])
    assert {*errors["1"]} == {"blocks.0.attn", "blocks.3.attn"}
    assert errors["1"]["blocks.0.attn"] < errors["start"]["blocks.0.attn"]
    page = (student / "linearize.html").read_text(encoding="utf-8")
    assert "linvit linearize --teacher=checkpoints/quickstart/version_0" in page
    assert all(f"{score:.4f}" in page for score in found.values())
    assert f"{errors['1']['blocks.3.attn']:.4f}" in page
    assert "teacher (MiB)" in page
    assert "student before any step" in page
    assert page.count("<img") == 4  # score, errors, time, maps
    assert "left out" not in page


def test_the_page_says_at_which_sides_a_student_was_timed():
    teacher = {32.0: 1.0, 64.0: 4.0, 96.0: 9.0, 128.0: 16.0}
    slow, fast, one = ({side: factor * time for side, time in teacher.items()} for factor in (2, 0.5, 2))
    del one[64.0], one[96.0], one[128.0]  # the time was over
    said = linearize.comparison(crossover(one, teacher))
    assert "Sides measured: 32 pixels (larger ones need more " in said
    assert said.endswith("The student is not faster at the largest side measured.")
    assert linearize.comparison(crossover(slow, teacher)).startswith("Sides measured: 32, 64, 96, 128 pixels. ")
    assert linearize.comparison(crossover(fast, teacher)).endswith("The student is faster at every side measured.")
    assert "faster from a side of about 74 pixels on" in linearize.comparison(crossover(fast | {64.0: 6}, teacher))


def test_a_hybrid_is_searched_once(folder, monkeypatch):
    root, _ = folder
    given = ["--teacher=checkpoints/quickstart/version_0", "--model.attention=focused", "--search_steps=2"]
    done = linvit("linearize", *given, "--budget=softmax=3", "--trainer.fast_dev_run=1", cwd=root)
    assert done.code == 0, done.err
    assert "focused: trained for 2 steps" in done.out
    monkeypatch.setattr(linearize, "SECONDS", 0.2)
    trained = []
    monkeypatch.setattr(Blocks, "_transfer", lambda *given: trained.append(given))
    done = linvit("linearize", *given, "--budget=softmax=3", "--trainer.max_epochs=1", cwd=root)
    assert done.code == 0, done.err
    assert not trained
    run = RunFolder(root / "checkpoints" / "quickstart" / "version_2")
    assert sorted(run.hparams["attention"]) == ["focused", "softmax", "softmax", "softmax"]
    page = (run.folder / "linearize.html").read_text(encoding="utf-8")
    assert ">found, softmax=3<" in page
    assert [*root.glob("checkpoints/*/search-*/search.html")]
    before = sorted((root / "checkpoints" / "quickstart").iterdir())
    for options, message in {
        "--budget=macs=0.1": "no hybrid of window {window_size: 4}, focused is within macs=0.1: the cheapest costs",
        "--budget=memory=1": "the budget's kind must be one of latency, macs, softmax; got 'memory'",
        "--choices=[linear]": "got --choices=[linear] without --budget",
        "--budget=macs=1 --choices=[focsed,linear]": "Did you mean 'focused'?",
        "--budget=macs=1 --model.attention=[linear,linear,linear,null]": (
            "--budget searches among attentions; got --model.attention"
        ),
        "--budget=macs=1 --search_steps=-1": "--search_steps must be",
        "--keep=2": "linearize --keep was removed. Use --budget softmax=N",
    }.items():
        refused = linvit("linearize", *given, *options.split(), cwd=root)
        assert message in " ".join(refused.err.split()), refused.err
    refused = linvit("linearize", *given[:2], "--model.backbone={name: deit_nano, depth: 5, embed_dim: 24}", cwd=root)
    assert "Set --model.backbone to that of the teacher" in refused.err
    assert sorted((root / "checkpoints" / "quickstart").iterdir()) == before  # no folder of a run that never was


STAGES = """[{trainer.max_epochs: 1, model.teacher.attention_inputs: teacher, model.teacher.task_weight: 0},
{trainer.max_epochs: 2, model.teacher.attention_weight: 0, model.teacher.feature_weight: 1}]"""


def test_stages_are_runs_that_start_from_the_one_before_and_resume(folder, monkeypatch):
    root, _ = folder
    commands = []

    def fit(run, fit=Run.fit):
        commands.append(run.resume_with)
        fit(run)

    monkeypatch.setattr(Run, "fit", fit)
    given = [
        "--teacher=checkpoints/quickstart/version_0",
        "--model.attention=focused",
        "--trainer.default_root_dir=new",
    ]
    given += [f"--stages={STAGES}", "--no_page", "--resume=auto"]

    def weights(run):
        return torch.load(root / run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]

    assert linvit("linearize", *given, "--trainer.max_epochs=1", cwd=root).code == 0
    assert {*commands} == {shlex.join(["linvit", "linearize", *given, "--trainer.max_epochs=1"])}  # what an end prints
    first, second = "new/stage_1/quickstart/version_0", "new/quickstart/version_0"
    before, after = weights(first), weights(second)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    config = yaml.safe_load((root / second / "config.yaml").read_text(encoding="utf-8"))
    options = config["model"]["init_args"]
    assert options["pretrained"]["source"].endswith(f"{first}/checkpoints/last.ckpt")
    assert "model.pretrained.source" not in RunFolder(root / second).options()  # it differs between runs in any case
    assert (options["teacher"]["feature_weight"], options["teacher"]["copied"]) == (1, "nothing")
    done = linvit("linearize", *given, cwd=root)  # the first stage is finished, the second has another epoch
    assert done.code == 0, done.err
    assert "resumes from last.ckpt" in done.log
    assert all(torch.equal(value, before[name]) for name, value in weights(first).items())
    assert not (root / "new/stage_1/quickstart/version_1").exists()
    assert not (root / "new/quickstart/version_1").exists()
    refused = linvit("fit", "--config=quickstart", f"--stages={STAGES}", cwd=root)
    assert "train them with linvit linearize" in refused.err
    other = "{trainer.max_epochs: 1, model.backbone: {name: deit_nano, depth: 2}}"  # fits no teacher of four blocks
    late = [*given[:2], "--trainer.default_root_dir=late", f"--stages=[{{trainer.max_epochs: 1}}, {other}]"]
    refused = linvit("linearize", *late, cwd=root)
    assert "is not of the backbone" in refused.err
    assert not (root / "late").exists()
    refused = linvit("linearize", *given[:-1], f"--ckpt_path={second}", cwd=root)
    assert "--ckpt_path is for one run, but stages are several" in refused.err


def test_a_student_is_scored_without_its_teacher(folder):
    root, _ = folder
    (root / "checkpoints" / "quickstart" / "version_0").rename(root / "gone")
    run = "checkpoints/quickstart/version_1"
    alone = linvit(
        "fit",
        f"--config={run}/config.yaml",
        "--model.teacher=null",
        f"--ckpt_path={run}",
        "--trainer.max_epochs=2",
        cwd=root,
    )
    assert alone.code == 0, alone.err  # a checkpoint names no file that is read
    assert "top1" in linvit("validate", f"--config={run}/config.yaml", f"--ckpt_path={run}", cwd=root).out


def test_a_teacher_is_a_run_a_model_of_timm_or_a_file(tmp_path):
    timm = with_teacher("timm:vit_tiny_patch16_224", ["--config=linearize/quickstart", "--model.lr=1"])
    options = timm["model"]["init_args"]
    assert options["backbone"] == {"name": "timm", "model": "vit_tiny_patch16_224", "pretrained": True}
    assert (options["teacher"]["source"], options["lr"], timm["config"]) == (None, 1, ["linearize/quickstart"])
    assert with_teacher("timm:vit_tiny_patch16_224", [])["config"] == ["linearize/features"]
    file = with_teacher("weights.pth", ["--config=linearize/quickstart"])
    assert file["model"]["init_args"]["teacher"]["source"] == "weights.pth"
    with pytest.raises(UserError, match=r"'gone' is neither the folder of a run, .*nor a file of weights\..* --config"):
        with_teacher("gone", ["--model.attention=focused"])
    run = tmp_path / "version_0"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=r"give the attention .*--model\.attention=focused"):
        with_teacher(str(run), ["--trainer.max_epochs=3"])


def test_weights_of_a_file_become_linear_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("linvit.backbones.timm.model.get_hf_file_metadata", None)  # as without a network
    torch.save(timm.create_model("test_vit").state_dict(), tmp_path / "vit.pth")
    for i in range(6):
        save(picture(i), tmp_path / "photos" / f"{i}.png")
    given = ["--model.attention=linear", "--data.source=photos", "--data.img_size=32", "--data.batch_size=2"]
    given += ["--data.num_workers=0", "--trainer.max_epochs=1", "--no_page"]
    alone = linvit("linearize", "--teacher=vit.pth", *given, cwd=tmp_path)
    assert "vit_small_patch14_dinov2" in alone.err
    assert "Set --model.backbone to that of the teacher" in alone.err.replace("\n", " ")
    download = linvit("linearize", "--teacher=timm:test_vit", *given, cwd=tmp_path)
    assert "are not on this machine" in download.err
    backbone = "--model.backbone={name: timm, model: test_vit}"
    assert backbone.replace("=", "='") + "'" in download.err
    done = linvit("linearize", "--teacher=vit.pth", backbone, *given, cwd=tmp_path)
    assert done.code == 0, done.err
    config = yaml.safe_load((tmp_path / "checkpoints/features/version_0/config.yaml").read_text(encoding="utf-8"))
    assert config["model"]["init_args"]["teacher"]["source"] == "vit.pth"
    assert config["data"]["init_args"]["mean"] == [0.5, 0.5, 0.5]


def test_the_teacher_that_is_named_wins_over_that_of_a_configuration(tmp_path):
    checkpoints = write_run(tmp_path / "mine/version_0") / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "best.ckpt").touch()
    text = tmp_path / "text.yaml"
    text.write_text("base: quickstart\nmodel:\n  init_args:\n    teacher: elsewhere.ckpt\n", encoding="utf-8")

    def read(teacher):
        options = [f"--config={text}", "--model.attention=linear"]
        return find_teacher(with_teacher(teacher, options))["model"]["init_args"]

    assert Teacher.of(read(str(checkpoints.parent))["teacher"]).source == str(checkpoints / "best.ckpt")
    found = read("timm:vit_tiny_patch16_224")
    assert found["backbone"]["model"] == "vit_tiny_patch16_224"
    assert Teacher.of(found["teacher"]).source is None


def test_a_teacher_that_was_trained_with_mesa(tmp_path):
    checkpoints = write_run(tmp_path / "mine/version_0", ema_decay=0.9, mesa=0.5) / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "best.ckpt").touch()
    given = with_teacher(str(checkpoints.parent), ["--config=linearize/quickstart"])["model"]["init_args"]
    assert (given["ema_decay"], given["mesa"]) == (None, 0)  # mesa compares with the moving average


def test_several_stages_or_variants_train_their_teacher_once(tmp_path, monkeypatch):
    write_run(tmp_path / "teacher/version_0")  # the first has trained it
    monkeypatch.setattr(subprocess, "Popen", None)
    assert train_teacher(Teacher(source=str(tmp_path / "teacher"), config="linearize/teacher"))


def test_two_commands_do_not_train_one_teacher(tmp_path):
    (tmp_path / "teacher").mkdir()
    script = (
        "import pathlib, linvit.io.files; linvit.io.files.lock(pathlib.Path('teacher')); print(1, flush=True); input()"
    )
    other = [sys.executable, "-c", script]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout.readline()
        with pytest.raises(UserError, match=r"another process is training the teacher, in '.*teacher'"):
            train_teacher(Teacher(source=str(tmp_path / "teacher"), config="linearize/teacher"))
        process.communicate(b"\n")


def test_a_teacher_is_needed(tmp_path):
    nothing = linvit("linearize", "--model.attention=linear", cwd=tmp_path)
    assert (nothing.code, "--teacher RUN, or a --config" in nothing.err) == (2, True)
    done = linvit("linearize", "--config=quickstart", cwd=tmp_path)
    assert done.code == 2
    assert "give the trained network to linearize" in done.err
