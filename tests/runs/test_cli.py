"""`fit`, `validate`, `test` and `predict`: a whole run, going on with it, and every mistake a user can make."""

import csv
import re
import signal
import time
from pathlib import Path

import datasets
import pytest
import torch
import yaml

from linvit.data import ClassificationData
from linvit.tasks import ClassificationTask
from tests.cli.forked import Ranks
from tests.cli.runs import QUICKSTART, Done, Run, events, files, flags, linvit, tiny, train
from tests.data.images import image_folder, picture, save

LOCAL = """
import linvit
from lightning.pytorch import Callback


class Mine(linvit.Attention):
    def forward(self, q, k, v, grid):
        return q @ (k.mT @ v) / k.shape[-2]


class Hello(Callback):
    def on_fit_start(self, trainer, pl_module):
        print("hello")
"""


class Failing(ClassificationTask):
    def __init__(self, **options):
        raise ValueError("no such thing")


class TestFit:
    """One run: its folder, its curves, its last words."""

    def test_the_run_folder(self, run):
        assert [path.name for path in run.root.iterdir()] == ["checkpoints"]
        assert [path.name for path in (run.root / "checkpoints").iterdir()] == ["quickstart"]
        found = {re.sub(r"tfevents.*", "tfevents", name) for name in files(run.folder)}
        others = {
            "hparams.yaml",
            "predictions_digits.csv",
            "test_classes.csv",
            "test_confusion.png",
            "test_images.csv",
        }  # of other verbs
        kept = {"checkpoints", "checkpoints/best.ckpt", "checkpoints/last.ckpt"}
        kept |= {"checkpoints/.lock"}
        told = {"metrics.csv", "result.json", "val_classes.csv", "val_confusion.png", "val_images.csv"}
        assert found - others == kept | told | {"config.yaml", "events.out.tfevents"}

    def test_the_whole_configuration_is_saved(self, run):
        saved = yaml.safe_load(run.config.read_text())
        assert saved["model"]["init_args"]["backbone"] == {"name": "deit_nano", "depth": 1}
        assert saved["model"]["init_args"]["attention"] == "focused"
        assert saved["data"]["init_args"]["batch_size"] == 16
        assert saved["trainer"]["limit_train_batches"] == 10
        assert saved["seed_everything"] == 0

    def test_the_facts_of_the_data_reach_the_model(self, run):
        kept = torch.load(run.checkpoint("best"), weights_only=True)["hyper_parameters"]
        assert kept["num_classes"] == 10
        assert kept["img_size"] == 32
        assert kept["class_names"] == [str(digit) for digit in range(10)]

    def test_the_curves(self, run):
        curves = events(run.folder)
        assert [step for step, _ in curves["train/loss"]] == list(range(20))
        assert [step for step, _ in curves["val/score"]] == [9, 19]
        assert {"val/loss", "val/top1", "val/top5", "images/s", "epoch"} <= set(curves)
        assert [step for step, _ in curves["lr"]] == list(range(20))
        ranks = {"rank/blocks.0.attn" + part for part in ("", "/kernel", "/convolution")}
        assert {tag for tag in curves if tag.startswith("rank/")} == ranks

    def test_the_checkpoints(self, run):
        score = dict(events(run.folder)["val/score"])
        best, last = (torch.load(run.checkpoint(name), weights_only=True) for name in ("best", "last"))
        assert last["global_step"] == 20
        assert score[best["global_step"] - 1] == max(score.values())

    def test_the_last_words_are_true(self, run):
        log = run.done.log
        assert f"best val/score  {max(value for _, value in events(run.folder)['val/score']):.4f}" in log
        (paths,) = re.findall(r"linvit test --config (\S+) --ckpt_path (\S+)", log)
        assert all((run.root / path).is_file() for path in paths)
        assert "tensorboard --logdir checkpoints/quickstart" in log
        assert f"linvit fit --config {paths[0]} --resume=auto --trainer.max_epochs=MORE" in log  # or nothing is left

    def test_a_second_run_gets_a_folder_of_its_own(self, tmp_path):
        short = flags(trainer__max_epochs=1, trainer__limit_train_batches=2)
        train(tmp_path, *short)
        train(tmp_path, *short, "--model.attention=linear")
        runs = tmp_path / "checkpoints" / "quickstart"
        assert sorted(path.name for path in runs.iterdir()) == ["version_0", "version_1"]
        attentions = [yaml.safe_load((runs / f"version_{i}" / "config.yaml").read_text()) for i in (0, 1)]
        assert [config["model"]["init_args"]["attention"] for config in attentions] == ["focused", "linear"]
        assert (runs / "version_1" / "checkpoints" / "best.ckpt").is_file()

    def test_the_same_seed_gives_the_same_run(self, run, tmp_path):
        twin = train(tmp_path)
        one, other = (torch.load(r.checkpoint("last"), weights_only=True)["state_dict"] for r in (run, twin))
        assert all(torch.equal(one[name], other[name]) for name in one)

    def test_a_run_without_checkpoints(self, tmp_path):
        short = flags(
            trainer__max_epochs=1,
            trainer__limit_train_batches=2,
            trainer__enable_checkpointing=False,
            model__ema_decay=0.9,
        )
        run = train(tmp_path, *short)
        assert not list(tmp_path.rglob("*.ckpt"))
        assert (run.folder / "metrics.csv").is_file()

    def test_nothing_is_advertised_and_no_library_speaks_of_its_own_affairs(self, run):
        done = run.then("fit", *flags(trainer__max_epochs=2), checkpoint="last")
        for words in ("Tip:", "litlogger", "pypi.org", "exists and is not empty"):
            assert words not in run.done.log + run.done.err + done.log + done.err

    def test_classes_in_the_current_folder(self, tmp_path):
        """As the console script finds them: pytest does not look into the current folder by itself."""
        (tmp_path / "loc.py").write_text(LOCAL, encoding="utf-8")
        short = tiny(trainer__max_epochs=1, trainer__limit_train_batches=2)
        chosen = ["--model.attention=loc:Mine", "--trainer.callbacks+=loc.Hello"]
        process = Ranks(["fit", "--config=quickstart", *short, *chosen], tmp_path)
        assert process.wait() == [0], process.text()
        assert "hello" in process.text()

    def test_fast_dev_run_leaves_nothing(self, tmp_path):
        assert (
            linvit("fit", f"--config={QUICKSTART}", *tiny(), *flags(trainer__fast_dev_run=True), cwd=tmp_path).code == 0
        )
        assert files(tmp_path) == []


class TestScore:
    """The saved configuration and a checkpoint give the score that training saw."""

    SHORT = flags(trainer__limit_test_batches=4)

    def score(self, done, tag):
        assert done.code == 0, done.err
        return float(re.search(rf"{tag}\s+(\d\S*)", done.out)[1])

    def test_validate_gives_the_score_of_training(self, run):
        done = run.then("validate")
        best = max(value for _, value in events(run.folder)["val/score"])
        assert self.score(done, "val/score") == pytest.approx(best)

    @pytest.fixture(scope="class")
    @classmethod
    def tested(cls, run):
        return cls().score(run.then("test"), "test/score")

    @pytest.fixture(scope="class")
    @classmethod
    def short(cls, run):
        """Of some images."""
        return cls().score(run.then("test", *cls.SHORT), "test/score")

    @pytest.fixture(scope="class")
    @classmethod
    def predicted(cls, run):
        done = run.then("predict")
        assert done.code == 0
        with (run.folder / "predictions_digits.csv").open(newline="") as file:
            return list(csv.reader(file))

    def test_predictions_are_a_table(self, predicted):
        header, *rows = predicted
        assert header == ["id", "class", "probability"]
        assert [row[0] for row in rows] == [str(i) for i in range(360)]
        assert {row[1] for row in rows} <= {str(digit) for digit in range(10)}
        assert all(0.1 <= float(row[2]) <= 1 for row in rows)

    def test_test_and_predict_agree(self, tested, predicted):
        labels = ClassificationData("digits").splits["test"]["label"]
        right = sum(row[1] == str(label) for row, label in zip(predicted[1:], labels, strict=True))
        assert tested == pytest.approx(right / 360, abs=1e-6)
        assert 0 < right < 360, "all or nothing shows little"

    def test_they_make_no_folder(self, run, tested, predicted):
        assert sorted(path.name for path in run.folder.parent.iterdir()) == ["version_0"]
        assert "lightning_logs" not in files(run.root)

    def test_no_source_overwrites_the_predictions_of_another(self, run, predicted, tmp_path):
        before = {path: path.read_bytes() for path in run.folder.glob("predictions*")}
        for folder in ("a/mine", "b/mine"):
            save(picture(len(folder)), tmp_path / folder / "1.png")
            done = run.then("predict", *flags(data__source=tmp_path / folder))
            path = re.search(r"wrote 1 predictions to (\S+)", done.log)[1]
            assert str(tmp_path / folder / "1.png") in Path(path).read_text(encoding="utf-8")
        assert before.items() < {path: path.read_bytes() for path in run.folder.glob("predictions*")}.items()
        made = [path for path in run.folder.glob("predictions*") if path not in before]
        assert len(made) == 2
        for path in made:
            path.unlink()

    def test_without_a_checkpoint_nothing_is_left(self, tmp_path):
        options = tiny(trainer__limit_test_batches=1)
        done = linvit("test", f"--config={QUICKSTART}", *options, "--untrained", cwd=tmp_path)
        assert done.code == 0, done.err
        assert "test/score" in done.out
        assert files(tmp_path) == []

    def test_a_runs_folder_stands_for_its_best_checkpoint(self, run, short):
        done = linvit("test", f"--config={run.config}", f"--ckpt_path={run.folder}", *self.SHORT, cwd=run.root)
        assert self.score(done, "test/score") == short
        assert f"--ckpt_path={run.folder} is a run folder: using its checkpoints/best.ckpt" in done.log
        assert "is ignored" not in done.log

    def test_a_folder_of_the_users_images_is_predicted_by_path(self, run, tmp_path):
        for seed in range(5):
            save(picture(seed), tmp_path / "mine" / f"{seed}.png")
        writer = {"class_path": "linvit.callbacks.PredictionWriter", "init_args": {"path": str(tmp_path / "mine.csv")}}
        done = run.then("predict", *flags(data__source=tmp_path / "mine", trainer__callbacks=f"[{writer}]"))
        assert done.code == 0, done.err
        with (tmp_path / "mine.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert sorted(row["id"] for row in rows) == [str(tmp_path / "mine" / f"{seed}.png") for seed in range(5)]
        assert not (run.folder / "mine.csv").exists()

    def test_the_checkpoint_decides_the_model_and_says_so(self, run, short):
        done = run.then("test", "--model.attention=linear", "--model.lr=3", *self.SHORT)
        assert self.score(done, "test/score") == short
        said = [line for line in done.log.splitlines() if line.startswith("the checkpoint decides the model: ")]
        assert all("is ignored" in line for line in said)
        assert [line.split()[5].partition("=")[0] for line in said] == ["--model.attention", "--model.lr"]

    def test_the_original_config_will_do(self, run, tested):
        saved = [f"--ckpt_path={run.checkpoint('best')}", "--model.predict_with=raw"]
        done = linvit("test", f"--config={QUICKSTART}", *saved, cwd=run.root)
        assert self.score(done, "test/score") == pytest.approx(tested, abs=1e-6)


class TestGoingOn:
    """A run that ended, or was killed, goes on in its folder."""

    def check(self, root, first, then):
        """One run folder, whose curves go on where they ended."""
        folder = root / "checkpoints" / "quickstart"
        assert [path.name for path in folder.iterdir()] == ["version_0"]
        folder = folder / "version_0"
        assert (folder / "config.yaml").is_file()
        assert [path.name for path in folder.glob("config_from_step_*.yaml")] == [f"config_from_step_{first}.yaml"]
        last = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        assert last["global_step"] == then
        return events(folder)

    def test_it_goes_on_where_it_ended(self, tmp_path):
        run = train(tmp_path, *flags(trainer__max_epochs=1, model__warmup_epochs=0))
        before = run.config.read_text()
        done = run.then("fit", *flags(trainer__max_epochs=3), checkpoint="last")
        assert done.code == 0, done.err
        curves = self.check(tmp_path, 10, 30)
        assert [step for step, _ in curves["train/loss"]] == list(range(30))
        assert [step for step, _ in curves["val/score"]] == [9, 19, 29]
        assert run.config.read_text() == before
        assert yaml.safe_load((run.folder / "config_from_step_10.yaml").read_text())["trainer"]["max_epochs"] == 3
        assert dict(curves["lr"])[15] == pytest.approx((2e-3 + 1e-5) / 2)  # half of the longer cosine
        (paths,) = re.findall(r"linvit test --config (\S+) --ckpt_path (\S+)", done.log)
        assert all((tmp_path / path).is_file() for path in paths)
        assert paths[0].endswith("config_from_step_10.yaml")  # whose max_epochs is that of this run

    def test_its_hyper_parameters_are_those_of_the_run_that_goes_on(self, tmp_path):
        run = train(tmp_path, *flags(trainer__max_epochs=1, model__lr_base_batch_size=16))
        saved = run.folder / "hparams.yaml"
        assert {"total_batch: 16", "peak_lr: 0.002"} <= set(saved.read_text().splitlines())
        done = run.then("fit", *flags(trainer__max_epochs=2, data__batch_size=8), checkpoint="last")
        assert done.code == 0, done.err
        assert {"total_batch: 8", "peak_lr: 0.001", "backbone:"} <= set(saved.read_text().splitlines())

    def test_a_checkpoint_from_elsewhere_starts_a_new_run(self, run, tmp_path):
        copy = tmp_path / "downloaded.ckpt"
        copy.write_bytes(run.checkpoint("last").read_bytes())
        done = linvit("fit", f"--config={run.config}", f"--ckpt_path={copy}", "--trainer.max_epochs=3", cwd=tmp_path)
        assert done.code == 0, done.err
        folder = tmp_path / "checkpoints" / "quickstart" / "version_0"
        assert (folder / "config.yaml").is_file()
        assert [step for step, _ in events(folder)["train/loss"]] == list(range(20, 30))

    @pytest.fixture(scope="class")
    @staticmethod
    def killed(tmp_path_factory):
        """A run in a process of its own that was killed in an epoch."""
        root = tmp_path_factory.mktemp("killed")
        options = {"trainer__max_epochs": 1000, "trainer__limit_val_batches": 1}
        arguments = ["fit", f"--config={QUICKSTART}", *tiny(**options)]
        process = Ranks(arguments, root)
        checkpoint = Run(root, Done(0, "", "", "")).checkpoint("last")
        deadline = time.monotonic() + 120
        while not checkpoint.exists() and process.started[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert checkpoint.exists(), process.text()
        time.sleep(0.5)
        process.send(signal.SIGKILL, [0])
        assert process.wait() == [-signal.SIGKILL], process.text()
        return Run(root, Done(0, "", "", ""))

    def test_it_survives_kill_9(self, killed):
        step = torch.load(killed.checkpoint("last"), weights_only=True)["global_step"]
        assert step >= 10
        done = killed.then("fit", f"--trainer.max_epochs={step // 10 + 1}", checkpoint="last")
        assert done.code == 0, done.err
        curves = self.check(killed.root, step, step + 10)
        assert max(curves["val/score"])[0] == step + 9

    def test_one_batch_is_one_batch(self, killed):
        """Not the share 1.0 of them. Only a process of its own tells: it depends on what was imported first."""
        assert "\n  limit_val_batches: 1\n" in killed.config.read_text()


class TestMistakes:
    """Exit code 2, a message with the value and the way out, no traceback, and nothing left behind."""

    def error(self, cwd, *arguments, verb="fit"):
        before = files(cwd)
        done = linvit(verb, *arguments, cwd=cwd)
        assert done.code == 2
        assert done.out == ""
        text = done.err[done.err.index("linvit: error: ") :]
        assert "Traceback" not in done.err
        assert "jsonargparse" not in text
        assert "<class" not in text
        assert "typing." not in text
        left = set(files(cwd)) - set(before)
        return text, left

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"model__attention": "focussed"}, ["no attention is called 'focussed'", "Did you mean 'focused'?"]),
            ({"model__attention": "{name: focused, focusing: 4}"}, ["'focusing'", "Did you mean 'focusing_factor'?"]),
            ({"model__attention": "{focusing_factor: 4}"}, ["has no name", "{name: NAME, option: value}"]),
            ({"model__attention.focusing_factor": 4}, ["has no name", "--model.attention.name=NAME"]),
            ({"model__attention": "[softmax, linear, softmax]"}, ["lists 3 specs", "1 stage(s)"]),
            (
                {"model__backbone": "{name: timm, model: test_vit.r160_in1k, pretrained: true}"},
                ["model.backbone.pretrained", "huggingface.co/timm/test_vit.r160_in1k/", "--model.pretrained=FILE"],
            ),
            ({"data__img_size": 30}, ["image size 30x30 is not divisible by patch size 4", "28x28 and 32x32"]),
            ({"data__source": "nowhere/images"}, ["no data at 'nowhere/images'", "hub:owner/name"]),
            ({"data__source": "digit"}, ["no data at 'digit'", "Did you mean 'digits'?"]),
            ({"data__num_classes": 12}, ["has 10 classes", "num_classes is 12", "num_classes=10"]),
            ({"model__atention": "linear"}, ["'atention'", "Did you mean --model.attention?"]),
            (
                {"trainer__max_epoch": 3},
                ["trainer.max_epoch", "Did you mean --trainer.max_epochs?"],
            ),  # an abbreviation, too
            ({"no_such_section": 3}, ["no_such_section"]),
            ({"model__lr": "fast"}, ["lr", "float", "fast"]),
            ({"data__crop_mode": "x"}, ["center", "squash", "Got value: x"]),
            ({"trainer__log_every_n_steps": 0}, ["--trainer.log_every_n_steps must be a whole number at least 1"]),
            ({"seed_everything": -1}, ["--seed_everything must be a whole number at least 0", "got -1"]),
            ({"trainer__devices": "[a]"}, ["--trainer options do not go together"]),
            ({"trainer__precision": "8-bit"}, ["8-bit"]),
            ({"model": "NoSuchTask"}, ["NoSuchTask"]),
        ],
        ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
    )
    def test_on_the_command_line(self, tmp_path, changes, words):
        text, left = self.error(tmp_path, f"--config={QUICKSTART}", *tiny(), *flags(**changes))
        assert [word for word in words if word not in text] == [], text
        assert not left

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            ("    attention: focused", "    atention: focused", ["'atention'", "Did you mean --model.attention?"]),
            ("    attention: focused", "    old_option: 1", ["another version of linvit", "remove it from mine.yaml"]),
            ("model:", "modell:", ["modell", "Did you mean --model"]),
            ("data.yaml", "nowhere.yaml", ["nowhere.yaml"]),
            ("model:", "model: [", ["mine.yaml"]),
        ],
        ids=["key", "of another version", "section", "sibling", "syntax"],
    )
    def test_in_a_yaml_file(self, tmp_path, old, new, words):
        content = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
        for part in ("trainer", "data"):
            (tmp_path / f"{part}.yaml").write_text(yaml.safe_dump(content[part]), encoding="utf-8")
        text = """
trainer: trainer.yaml
data: data.yaml
model:
  class_path: linvit.tasks.ClassificationTask
  init_args:
    backbone: deit_nano
    attention: focused
    lr: 2.0e-3
"""
        assert old in text
        (tmp_path / "mine.yaml").write_text(text.replace(old, new))
        message, left = self.error(tmp_path, "--config=mine.yaml", *flags(trainer__accelerator="cpu"))
        assert [word for word in words if word not in message] == [], message
        assert not left

    def test_an_error_in_a_constructor_comes_without_the_configuration(self, tmp_path):
        with pytest.raises(ValueError, match=r"^no such thing$"):
            linvit("fit", f"--config={QUICKSTART}", *tiny(model=f"{__name__}.Failing"), cwd=tmp_path)

    def test_no_config_at_all(self, tmp_path):
        text, left = self.error(tmp_path)
        assert "linvit fit needs a configuration" in text
        assert "linvit fit --config quickstart" in text
        assert "linvit list configs" in text
        assert not left
        assert "linvit test --config RUN/config.yaml --ckpt_path" in self.error(tmp_path, verb="test")[0]

    def test_a_word_too_many(self, tmp_path):
        text, left = self.error(tmp_path, f"--config={QUICKSTART}", "model.lr=3")
        assert "unrecognized arguments: model.lr=3" in text
        assert not left

    def test_a_schedule_without_an_end(self, tmp_path):
        text, _ = self.error(tmp_path, f"--config={QUICKSTART}", *tiny(trainer__max_epochs=-1))
        assert "set trainer.max_epochs or trainer.max_steps" in text

    def test_an_output_folder_below_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        text, left = self.error(tmp_path, f"--config={QUICKSTART}", *tiny(trainer__default_root_dir="file/runs"))
        assert f"cannot write to the output folder '{tmp_path}/file/runs/quickstart': '{tmp_path}/file': Not a" in text
        assert "--trainer.default_root_dir" in text
        assert not left

    def test_unlabelled_images_cannot_be_trained_on(self, tmp_path):
        for seed in range(20):
            save(picture(seed), tmp_path / "mine" / f"{seed}.png")
        for options, words in (
            (
                {},
                "the data does not define the number of classes. To train, score or probe, give each class a folder",
            ),
            ({"data__num_classes": 3}, "data source 'mine' has no labels, so it can only be predicted"),
        ):
            text, left = self.error(tmp_path, f"--config={QUICKSTART}", *tiny(data__source="mine", **options))
            assert words in text
            assert "images directly in train/ have no class" in text
            assert not [name for name in left if name.endswith(".ckpt")]

    def test_a_broken_image_ends_the_run_with_its_name(self, tmp_path):
        image_folder(tmp_path / "mine", ["train", "val"])
        (tmp_path / "mine" / "val" / "bee" / "1.png").write_bytes(b"no image")  # evaluation skips none
        for workers in (0, 1):
            options = {"data__source": "mine", "data__batch_size": 2, "data__num_workers": workers}
            text, _ = self.error(tmp_path, f"--config={QUICKSTART}", *tiny(**options))
            assert text.startswith(f"linvit: error: image {tmp_path}/mine/val/bee/1.png cannot be decoded")


class TestCheckpointMistakes:
    """A checkpoint that cannot be what was meant, refused before anything starts."""

    error = TestMistakes.error

    def test_a_missing_one(self, run, tmp_path):
        path = run.checkpoint("best").with_name("bset.ckpt")
        text, left = self.error(tmp_path, f"--config={run.config}", f"--ckpt_path={path}")
        assert f"checkpoint '{path}' does not exist" in text
        assert not left

    @pytest.mark.parametrize("verb", ["validate", "predict"])
    def test_none(self, run, tmp_path, verb):
        for config, way in ((QUICKSTART, "--ckpt_path RUN,"), (run.config, f"--ckpt_path {run.folder}")):
            done = linvit(verb, f"--config={config}", cwd=tmp_path)
            assert done.code == 2
            assert way in done.err
            assert "--untrained" in done.err
        assert not files(tmp_path)

    def test_a_truncated_one(self, run, tmp_path):
        (tmp_path / "x.ckpt").write_bytes(run.checkpoint("best").read_bytes()[:100_000])
        text, left = self.error(tmp_path, f"--config={run.config}", "--ckpt_path=x.ckpt")
        assert "checkpoint 'x.ckpt' is incomplete or not a checkpoint (100000 bytes)" in text
        assert not left

    def changed(self, run, path, change):
        content = torch.load(run.checkpoint("best"), weights_only=True)
        change(content)
        torch.save(content, path)

    def test_one_whose_weights_are_of_another_model(self, run, tmp_path):
        def change(content):
            del content["state_dict"]["network.pos_embed"]

        self.changed(run, tmp_path / "x.ckpt", change)
        text, left = self.error(tmp_path, f"--config={run.config}", "--ckpt_path=x.ckpt", verb="test")
        assert (
            "checkpoint 'x.ckpt' belongs to another model; it names backbone deit_nano, attention focused: network.pos"
            in text
        )
        assert not left

    def test_one_of_another_task(self, run, tmp_path):
        self.changed(run, tmp_path / "x.ckpt", lambda content: content["hyper_parameters"].update(anchors=3))
        text, left = self.error(tmp_path, f"--config={run.config}", "--ckpt_path=x.ckpt", verb="test")
        assert "checkpoint 'x.ckpt' belongs to another task (backbone deit_nano, attention focused): " in text
        assert "linvit.tasks.ClassificationTask takes no anchors" in text
        assert not left

    def test_one_of_another_version(self, run, tmp_path):
        def change(content):
            content["hyper_parameters"].update(old_option=3)
            content["linvit"].update(version="0.0.7")

        self.changed(run, tmp_path / "x.ckpt", change)
        text, left = self.error(tmp_path, f"--config={run.config}", "--ckpt_path=x.ckpt", verb="test")
        assert "checkpoint 'x.ckpt' is of linvit 0.0.7 (" in text
        assert "takes no old_option. --model.pretrained=x.ckpt in place of --ckpt_path takes its weights" in text
        assert not left

    @pytest.mark.parametrize("verb", ["fit", "test"])
    def test_one_of_other_classes(self, run, tmp_path, verb):
        image_folder(tmp_path / "mine", ["train", "val", "test"])
        arguments = [f"--config={run.config}", f"--ckpt_path={run.checkpoint('best')}", "--data.source=mine"]
        text, left = self.error(tmp_path, *arguments, verb=verb)
        assert f"checkpoint '{run.checkpoint('best')}' was trained on 10 classes, but the data has 2" in text
        assert ("score them alone: --data.classes=subset" in text) == (verb != "fit")
        assert not left

    def test_one_of_the_same_classes_in_another_order(self, run, tmp_path):
        names = [*map(str, reversed(range(10)))]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
        rows = {"image": [picture(seed) for seed in range(10)], "label": [*range(10)]}
        (tmp_path / "mine").mkdir()
        for split in ("train", "val", "test"):
            datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "mine" / f"{split}.parquet")
        arguments = [f"--config={run.config}", f"--ckpt_path={run.checkpoint('best')}", "--data.source=mine"]
        text, left = self.error(tmp_path, *arguments, verb="test")
        assert "has other numbers for classes of the data: '9' is number 9 of it, and 0 of the data" in text
        assert "score them alone: --data.classes=subset" in text
        assert not left


def test_a_mistake_in_the_shell_shows_no_traceback(tmp_path):
    """What the other tests do in this process, once from outside."""
    process = Ranks(["fit", f"--config={QUICKSTART}", *tiny(model__attention="focussed")], tmp_path)
    assert process.wait() == [2], process.text()
    assert "linvit: error: no attention is called 'focussed'. Did you mean 'focused'?" in process.text()
    assert "Traceback" not in process.text()
