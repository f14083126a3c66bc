"""Checkpoints from Python: wherever they lie, nothing in them is run or imported, and good ones are loaded."""

import json
import sys

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint

from linvit import UserError
from linvit.data import ClassificationData
from linvit.tasks import ClassificationTask
from linvit.tasks.safe_loading import SCHEMES, names_own_files
from tests.training import TINY, batches, fit, tiny_task, trainer
from tests.web import serving
from tests.weights import bombs

VERBS = ("fit", "validate", "test", "predict")


@pytest.fixture
def web(tmp_path):
    (tmp_path / "web").mkdir()
    with serving(tmp_path / "web") as (address, asked):
        yield tmp_path / "web", address, asked


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A task that was trained for an epoch, and its checkpoint."""
    folder, task = tmp_path_factory.mktemp("good"), tiny_task()
    fit(task, folder).save_checkpoint(folder / "good.ckpt")
    return task, folder / "good.ckpt"


@pytest.fixture
def changed(good, tmp_path):
    """Writes the good checkpoint with other options, or more keys."""

    def write(options=(), **keys):
        content = torch.load(good[1], weights_only=True)
        content["hyper_parameters"] |= dict(options)
        torch.save({**content, **keys}, tmp_path / "changed.ckpt")
        return tmp_path / "changed.ckpt"

    return write


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def doors(folder):
    """Every way from Python to open a checkpoint."""
    yield ClassificationTask.load_from_checkpoint
    for verb in VERBS:
        runner, data = trainer(folder, max_epochs=2), batches(8)
        yield lambda path, r=runner, v=verb, d=data: getattr(r, v)(tiny_task(), d, ckpt_path=path)


def test_nothing_runs_whether_it_lies_here_or_elsewhere(web, tmp_path):
    folder, address, asked = web
    mark = tmp_path / "mark"
    bombs.as_zip(folder / "x.ckpt", bombs.pickled(bombs.BOMBS["newobj"](str(mark))))
    for path in (folder / "x.ckpt", f"{address}/x.ckpt", f"simplecache::{address}/x.ckpt"):
        for door in doors(tmp_path):
            with pytest.raises(UserError, match=r"holds more than tensors and plain values|the kind of address"):
                door(path)
    assert not mark.exists()
    assert asked, "nothing was fetched, so this shows less than it should"
    torch.load(folder / "x.ckpt", weights_only=False)
    assert mark.exists(), "the bomb is a dud, so this shows nothing"


def test_a_good_one_is_loaded_wherever_it_lies(good, web, tmp_path):
    task, path = good
    folder, address, _ = web
    (folder / "good.ckpt").write_bytes(path.read_bytes())
    assert same(ClassificationTask.load_from_checkpoint(f"{address}/good.ckpt"), task)
    with path.open("rb") as file:
        assert same(ClassificationTask.load_from_checkpoint(file, predict_with="raw"), task)
    again = tiny_task()
    trainer(tmp_path).validate(again, batches(8), ckpt_path=f"{address}/good.ckpt", verbose=False)
    assert same(again, task)
    runner = trainer(tmp_path, max_epochs=2)
    runner.fit(tiny_task(), batches(16), ckpt_path=f"{address}/good.ckpt")
    assert runner.global_step == 4


def test_an_address_is_of_a_known_kind_and_answers(web):
    _, address, _ = web
    with pytest.raises(UserError, match=f"must be one of {SCHEMES[0]}"):
        ClassificationTask.load_from_checkpoint("reference://x.ckpt")
    with pytest.raises(UserError, match=f"cannot get the checkpoint '{address}/gone.ckpt'"):
        ClassificationTask.load_from_checkpoint(f"{address}/gone.ckpt")


def test_nobody_can_ask_for_less(good, tmp_path):
    with pytest.raises(UserError, match="with weights_only=True, and no other way"):
        ClassificationTask.load_from_checkpoint(good[1], weights_only=False)
    with pytest.raises(UserError, match="with weights_only=True, and no other way"):
        trainer(tmp_path).validate(tiny_task(), batches(8), ckpt_path=good[1], weights_only=False)


def test_what_lightning_would_call_is_refused(changed):
    for options in ({"_instantiator": "os.system"}, {"_class_path": "my_module.Task"}, {3: "x"}):
        with pytest.raises(UserError, match=f"is not opened: it holds {next(iter(options))}, by which"):
            ClassificationTask.load_from_checkpoint(changed(options))
    for key in ("hparams", "module_arguments"):
        with pytest.raises(UserError, match=f"is not opened: it holds {key}, by which"):
            ClassificationTask.load_from_checkpoint(changed(**{key: {"_instantiator": "os.system"}}))


CALL = {"class_path": "os.system", "init_args": {"command": "touch PWNED"}}
CIRCLE = {}
CIRCLE["name"] = CIRCLE


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("backbone", {**TINY, "depth": CALL}, "a class_path or init_args"),
        ("attention", ["softmax", {"name": "focused", "x": [[{"init_args": {}}]]}], "a class_path or init_args"),
        ("backbone", {**TINY, "depth": json.dumps(CALL)}, "which reads as a list or a mapping"),
        ("backbone", {**TINY, "depth": "class_path: this.Zen"}, "which reads as a list or a mapping"),
        ("backbone", CIRCLE, "lists and mappings without an end"),
        ("lr", torch.ones(1), "a Tensor"),
    ],
    ids=str,
)
def test_options_that_are_no_plain_values_are_refused(changed, option, value, reason):
    with pytest.raises(UserError, match=f"is not opened: its option '{option}' holds .*{reason}"):
        ClassificationTask.load_from_checkpoint(changed({option: value}))


def test_names_of_classes_are_any_text(changed):
    names = ["{a}", "b: c", "[", "class_path: d", "", "e", "f"]
    assert ClassificationTask.load_from_checkpoint(changed({"class_names": names})).hparams["class_names"] == names


@pytest.mark.parametrize("version", ["garbage", "0.5"])
def test_the_version_of_lightning_is_one(changed, version):
    with pytest.raises(UserError, match=r"it has no pytorch-lightning_version from 2\.0 on"):
        ClassificationTask.load_from_checkpoint(changed(**{"pytorch-lightning_version": version}))


def test_scoring_needs_no_state_of_training(changed, tmp_path):
    path = changed(loops={"validate_loop": 5}, callbacks={"ModelCheckpoint": 5}, MixedPrecision=3)
    trainer(tmp_path).validate(tiny_task(), batches(8), ckpt_path=path, verbose=False)


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        ("best_k_models", "runs/../victim.ckpt"),
        ("last_model_path", "runs/link.ckpt"),
        ("best_k_models", "runs/notes.txt"),
    ],
)
def test_lightning_s_callback_deletes_nothing_outside_of_its_folder(good, changed, tmp_path, victim, name):
    """Of the paths in a callback's state it deletes one when it saves a better checkpoint, or a later one."""
    (tmp_path / "victim.ckpt").mkdir()
    (tmp_path / "victim.ckpt" / "thesis.tex").touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link.ckpt").symlink_to(tmp_path / "victim.ckpt")
    (tmp_path / "runs" / "notes.txt").touch()
    path = str(tmp_path / victim)
    saves = ModelCheckpoint(tmp_path / "runs", "best", monitor="val/score", mode="max", save_last=True)
    state = {
        **saves.state_dict(),
        "dirpath": str(tmp_path / "runs"),
        "kth_value": torch.tensor(-1.0),
        "best_model_score": torch.tensor(-1.0),
        "best_model_path": path,
        **({"last_model_path": path} if name == "last_model_path" else {}),
        **(
            {"best_k_models": {path: torch.tensor(-1.0)}, "kth_best_model_path": path}
            if name != "last_model_path"
            else {}
        ),
    }
    runner = trainer(tmp_path, max_epochs=2, callbacks=[saves], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="starts without its state: it names files out of its folder"):
        runner.fit(tiny_task(), batches(16), batches(16), ckpt_path=changed(callbacks={saves.state_key: state}))
    assert (tmp_path / "victim.ckpt" / "thesis.tex").exists()
    assert (tmp_path / "runs" / "link.ckpt").is_symlink()
    assert (tmp_path / "runs" / "notes.txt").exists()
    assert saves.best_model_path == str(tmp_path / "runs" / "best.ckpt")


def test_a_callback_keeps_its_own_files(good, changed, tmp_path):
    """Those that it has saved, so that a better one takes the place of the worst."""
    saves = ModelCheckpoint(tmp_path / "runs", "{epoch}", monitor="val/score", mode="max", save_top_k=2)
    trainer(tmp_path, max_epochs=3, callbacks=[saves], enable_checkpointing=True).fit(
        tiny_task(), batches(16), batches(16)
    )
    state = saves.state_dict()
    assert len(state["best_k_models"]) == 2
    assert names_own_files(saves, state)


@pytest.mark.parametrize("state", [5, {}, {"best_k_models": 3}])
def test_a_state_that_is_none_of_the_callback(tmp_path, state):
    assert not names_own_files(ModelCheckpoint(tmp_path / "runs", monitor="val/score"), state)


@pytest.mark.parametrize("content", [3, {"hyper_parameters": [], "state_dict": {}}], ids=str)
def test_what_is_none_of_a_task(tmp_path, content):
    torch.save(content, tmp_path / "x.ckpt")
    for door in doors(tmp_path):
        with pytest.raises(UserError, match="is not a checkpoint of a linvit run"):
            door(tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=r"checkpoint '.*' does not exist"):
        ClassificationTask.load_from_checkpoint(tmp_path)


def test_kernels_of_a_gpu_are_left_out_where_there_is_none(good, changed):
    path = changed({"attention_kernel": "triton"})
    with pytest.warns(UserWarning, match="torch computes attention: attention_kernel=triton needs"):
        assert same(ClassificationTask.load_from_checkpoint(path), good[0])


class TestClasses:
    """A class that a checkpoint names by its path is imported if somebody else names it, too."""

    @pytest.fixture
    def module(self, tmp_path, monkeypatch):
        """A module with a backbone, which is imported nowhere."""
        code = "from linvit.backbones.deit import deit_tiny as Mine\n"
        (tmp_path / "module_of_a_checkpoint.py").write_text(code, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        yield "module_of_a_checkpoint:Mine"
        sys.modules.pop("module_of_a_checkpoint", None)

    def test_it_is_not_imported(self, changed, module):
        path = changed({"backbone": {**TINY, "name": module}})
        with pytest.raises(
            UserError, match=rf"the backbone class '{module}'.* --model.backbone={module} .* --allow={module} "
        ):
            ClassificationTask.load_from_checkpoint(path)
        assert "module_of_a_checkpoint" not in sys.modules

    def test_it_is_imported_if_it_is_named(self, good, changed, module):
        path = changed({"backbone": {**TINY, "name": module}})
        again = ClassificationTask.load_from_checkpoint(path, backbone={**TINY, "name": module})
        assert same(again, good[0])
        assert tiny_task(backbone={**TINY, "name": module}).network.num_classes == 7  # without a checkpoint

    def test_a_registered_class_may_be_named_by_its_path(self, changed):
        path = changed({"attention": "linvit.attention.linear:LinearAttention"})
        assert ClassificationTask.load_from_checkpoint(path, strict=False).hparams["attention"].endswith("Attention")


def test_weights_that_a_backbone_would_download_stay_where_they_are(changed, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "timm.create_model", lambda *_, pretrained, **__: asked.append(pretrained) or torch.nn.Identity()
    )
    path = changed({"backbone": {"name": "timm", "model": "resnet18", "pretrained": True}})
    with pytest.raises(RuntimeError, match="state_dict"):
        ClassificationTask.load_from_checkpoint(path)
    assert asked == [False]


def test_a_data_module_is_in_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="holds nothing of the data"):
        ClassificationData.load_from_checkpoint("http://127.0.0.1:9/x.ckpt")


def test_a_trainer_opens_other_modules_as_before(good, tmp_path):
    """Only tasks are guarded, also in a trainer that ran one before."""
    runner = trainer(tmp_path)
    runner.validate(tiny_task(), batches(8), ckpt_path=good[1], verbose=False)
    torch.save({"of": "another module"}, tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="is not a checkpoint of a linvit run"):
        runner.strategy.load_checkpoint(tmp_path / "other.ckpt")
    runner.strategy.connect(LightningModule())
    assert runner.strategy.load_checkpoint(tmp_path / "other.ckpt") == {"of": "another module"}
