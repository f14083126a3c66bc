"""Checkpoints from Python: wherever they lie, nothing in them is run or imported, and good ones are loaded."""

import sys

import pytest
import torch
from lightning.pytorch import LightningModule

from linvit import UserError
from linvit.data import ClassificationData
from linvit.tasks import ClassificationTask
from linvit.tasks.safe_loading import SCHEMES
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


@pytest.mark.parametrize("content", [3, {"state_dict": {}}, {"hyper_parameters": [], "state_dict": {}}], ids=str)
def test_what_is_none_of_a_task(tmp_path, content):
    torch.save(content, tmp_path / "x.ckpt")
    for door in doors(tmp_path):
        with pytest.raises(UserError, match="is not a checkpoint of a linvit run"):
            door(tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=r"not one of torch.distributed.checkpoint"):
        ClassificationTask.load_from_checkpoint(tmp_path)


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

    @pytest.mark.parametrize("nested", [False, True])
    def test_it_is_not_imported(self, changed, module, nested):
        path = changed({"backbone": {**TINY, "name": module} if nested else module})
        with pytest.raises(UserError, match=rf"names the backbone class '{module}'.* --model.backbone={module}"):
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
