"""No door opens a checkpoint in which a byte has changed."""

import pytest

import linvit
from linvit.callbacks.save_checkpoints import AtomicCheckpointIO
from linvit.runs.checkpoint import read_checkpoint
from linvit.tasks import ClassificationTask
from tests.training import batches, tiny_task, trainer


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """A checkpoint of the tiny task, a bit of whose weights has flipped."""
    path = tmp_path_factory.mktemp("damaged") / "last.ckpt"
    runner = trainer(path.parent, plugins=[AtomicCheckpointIO()], max_epochs=1)
    runner.fit(tiny_task(), batches(16))
    runner.save_checkpoint(path)
    ClassificationTask.load_from_checkpoint(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


DOORS = {
    "command line": lambda path, folder: read_checkpoint(path),
    "load_from_checkpoint": lambda path, folder: ClassificationTask.load_from_checkpoint(path),
    "load_pretrained": lambda path, folder: linvit.load_pretrained(tiny_task().network, path),
    "fit": lambda path, folder: trainer(folder, max_epochs=2).fit(tiny_task(), batches(16), ckpt_path=path),
    "validate": lambda path, folder: trainer(folder).validate(tiny_task(), batches(16), ckpt_path=path, verbose=False),
}


@pytest.mark.parametrize("door", DOORS)
def test_it_is_refused(damaged, tmp_path, door):
    with pytest.raises(linvit.UserError, match="is damaged"):
        DOORS[door](str(damaged), tmp_path)
