"""Checkpoints in folders: torch would run what is in them."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from linvit import UserError
from linvit.tasks import ClassificationTask
from linvit.weights.sharded import check_sharded
from tests.weights import bombs

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, that this is one process


class Bomb:
    """Runs when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return bombs.New, (self.mark,)


def state(**others):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": torch.ones(2).bfloat16(),
        **others,
    }


@pytest.fixture
def sharded(tmp_path):
    """Writes one."""

    def write(**others):
        dcp.save(state(**others), checkpoint_id=tmp_path / "sharded")
        return tmp_path / "sharded"

    return write


def test_a_good_one_is_let_through(sharded):
    folder = sharded(epoch=3, names=["a"])
    torch.save({"hyper_parameters": {"lr": 1.0}}, folder / "meta.pt")
    check_sharded(folder)


def test_a_bomb_in_the_contents(sharded, tmp_path):
    folder, mark = sharded(), tmp_path / "mark"
    for bomb in (Bomb(mark), {"state_dict_metadata": Bomb(mark)}):
        (folder / ".metadata").write_bytes(pickle.dumps(bomb))
        with pytest.raises(UserError, match=r"is not opened: UnpicklingError: it names tests.weights.bombs.New"):
            check_sharded(folder)
    assert not mark.exists()


def test_a_bomb_in_place_of_a_number(sharded, tmp_path):
    folder, mark = sharded(epoch=Bomb(tmp_path / "mark")), tmp_path / "mark"
    with pytest.raises(UserError, match="is not opened: UnpicklingError"):
        check_sharded(folder)
    assert not mark.exists()
    dcp.load({"epoch": 0}, checkpoint_id=folder)
    assert mark.exists(), "the bomb is a dud, so this shows nothing"


def test_a_bomb_beside_the_weights(sharded, tmp_path):
    folder, mark = sharded(), tmp_path / "mark"
    torch.save({"callbacks": Bomb(mark)}, folder / "meta.pt")
    with pytest.raises(UserError, match=r"it names tests.weights.bombs.New"):
        check_sharded(folder)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps(3), pickle.dumps({"storage_data": {}})])
def test_malformed_contents(sharded, content):
    folder = sharded()
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match="is not opened"):
        check_sharded(folder)


def test_a_folder_of_something_else(tmp_path):
    with pytest.raises(UserError, match=r"not one of torch.distributed.checkpoint"):
        ClassificationTask.load_from_checkpoint(tmp_path)
