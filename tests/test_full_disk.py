"""A disk that is full, here a limit on the size of files: one sentence, and nothing that is half-made."""

import contextlib
import errno

import numpy as np
import pytest
from PIL import Image

from linvit import UserError
from linvit.callbacks.report import write_picture, write_table
from linvit.errors import find_user_error
from linvit.inference import export
from linvit.inference.export import Export
from linvit.io.files import new_folder, write_text
from tests.cli.runs import files, linvit

resource = pytest.importorskip("resource", reason="Windows has no limit on the size of files")


@contextlib.contextmanager
def files_of_at_most(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def noise(side=64):
    return np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8)


def test_each_way_to_write_leaves_the_old_file_and_names_it(tmp_path):
    ways = {
        "text.json": lambda path: write_text(path, "x" * 9000),
        "picture.png": lambda path: write_picture(path, Image.fromarray(noise())),
        "picture.jpg": lambda path: write_picture(path, Image.fromarray(noise()), quality=95),
        "table.csv": lambda path: write_table(path, [["x" * 100]] * 100),
    }
    for name, write in ways.items():
        path = tmp_path / name
        path.write_bytes(b"old")
        with files_of_at_most(1000), pytest.raises(OSError, match=str(path)) as refused:
            write(path)
        assert (refused.value.filename, refused.value.errno is None) == (str(path), False), name
        assert str(path) in str(find_user_error(refused.value))
        assert path.read_bytes() == b"old"
        write(path)
        assert path.stat().st_size > 1000
    assert files(tmp_path) == sorted(ways)


def test_a_new_folder_is_there_when_it_is_whole(tmp_path):
    folder = tmp_path / "new"
    for error in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises(type(error)):  # noqa: PT012, SIM117
            with new_folder(folder) as part:
                (part / "a").write_text("1", encoding="utf-8")
                assert not folder.exists()
                raise error
        assert files(tmp_path) == []
    folder.mkdir()  # an empty one may be there
    with new_folder(folder) as part:
        (part / "a").write_text("1", encoding="utf-8")
    assert files(tmp_path) == ["new", "new/a"]


@pytest.mark.parametrize(
    "command",
    [
        "push {run} --to out --license=mit",
        "data tile folder --images pictures --masks masks --output out --size=64",
        "predict --model {run} pictures --output=out",
        "list configs quickstart --output out.yaml",
    ],
)
def test_a_command_ends_with_a_sentence_and_leaves_nothing_half_made(run, tmp_path, command):
    for name, pixels in (("pictures", noise(256)), ("masks", noise(256)[..., 0] % 3)):
        (tmp_path / name).mkdir()
        Image.fromarray(pixels).save(tmp_path / name / "a.png")
    before = files(tmp_path)
    with files_of_at_most(20):
        done = linvit(*command.format(run=run.folder).split(), cwd=tmp_path)
    assert done.code == 2, done.err
    assert "Free some space there, or choose another folder" in done.err
    assert "out" in done.err
    assert [name for name in files(tmp_path) if name not in (*before, "out")] == []
    assert "tile" not in command or "out" not in files(tmp_path)


def test_an_export_does_not_blame_torch_for_the_disk(run, tmp_path, monkeypatch):
    def refuse(*args):
        raise RuntimeError("of the exporter") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "to_onnx", refuse)
    exported = Export.__new__(Export)
    exported.is_detector, exported.fixed, exported.size, exported.exported, exported.outputs = (
        False,
        "",
        (8, 8),
        None,
        [],
    )
    exported.with_preprocessing, exported.channels = False, 3
    with pytest.raises(OSError, match="No space left"):
        exported.write(tmp_path / "x.onnx")


def test_errors_of_the_disk_are_found_behind_others_and_others_are_not():
    assert find_user_error(OSError(errno.ENOENT, "No such file or directory", "x")) is None
    assert find_user_error(ValueError()) is None
    wrapped = RuntimeError("of a library")
    wrapped.__cause__ = OSError(errno.EMFILE, "Too many open files", "x")
    assert "ulimit -n" in str(find_user_error(wrapped))
    assert "ulimit -n" in str(find_user_error(RuntimeError("received 0 items of ancdata")))  # Python's words for it
    mistake = UserError("mine")
    mistake.__cause__ = wrapped
    assert find_user_error(mistake) is mistake
