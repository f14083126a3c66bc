"""The one reader of pickled files: what it gives back, and that it runs nothing."""

import argparse
import ast
import copyreg
import datetime
import pickle
import re
import struct
import warnings
from collections import OrderedDict, defaultdict, deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import linvit
from linvit.weights import torch_file
from tests.weights import bombs
from tests.weights.files import yacs_save

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")
FORMATS = pytest.mark.parametrize("old", [False, True], ids=["zip", "stream"])


@pytest.fixture(autouse=True)
def extension():
    copyreg.add_extension(bombs.HERE, "New", bombs.EXTENSION)
    yield
    copyreg.remove_extension(bombs.HERE, "New", bombs.EXTENSION)


@pytest.mark.parametrize("name", bombs.BOMBS)
@pytest.mark.parametrize("kind", bombs.FORMATS)
def test_a_bomb_does_not_go_off(tmp_path, name, kind):
    """The weights beside it are read, or the file is refused."""
    path, mark = tmp_path / "x.pth", tmp_path / "mark"
    bombs.FORMATS[kind](path, bombs.pickled(bombs.BOMBS[name](str(mark))))
    if kind != "pickle" and name in bombs.REPLACED:
        assert torch_file.load(path)["model"] == {}
    else:
        with pytest.raises(linvit.UserError, match=r"not a checkpoint|is not opened"):
            torch_file.load(path)
    with pytest.raises(linvit.UserError, match=r"not a checkpoint|is not opened"):
        torch_file.load(path, objects=False)
    assert not mark.exists()


@pytest.mark.parametrize("name", bombs.BOMBS)
def test_each_bomb_is_live(tmp_path, name):
    path = tmp_path / "mark"
    pickle.loads(bombs.pickled(bombs.BOMBS[name](str(path))))
    assert path.exists()


def test_nothing_else_in_linvit_opens_a_pickle():
    """Every door to a file of weights is this reader, so the bombs are tried on it alone."""
    modules = "torch", "torch.jit", "torch.serialization", "pickle", "cPickle", "dill", "joblib", "np", "numpy"
    openers = {f"{module}.{name}" for module in modules for name in ("load", "loads", "Unpickler")}
    package, found = Path(linvit.__file__).parent, set()
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"load|Unpickler", text) else ():
            named = {ast.unparse(node)} if isinstance(node, ast.Attribute) else set()
            if isinstance(node, ast.ImportFrom):
                named = {f"{node.module}.{alias.name}" for alias in node.names}
            if named & openers:
                found.add(file.relative_to(package).as_posix())
    kit = {name for name in found if name.startswith("testing/")}  # it pickles what it checks, in memory
    assert found - kit == {"weights/torch_file.py"}


@pytest.mark.parametrize("system", ["posix", "nt"])
def test_under_windows_no_file_stays_open_by_its_tensors(tmp_path, monkeypatch, system):
    """No process could replace it there: a checkpoint may be read while a run replaces it."""
    path = tmp_path / "x.ckpt"
    torch.save({"w": torch.ones(2**16)}, path)
    monkeypatch.setattr(torch_file, "os", SimpleNamespace(name=system))
    found = torch_file.load(path)["w"]
    mapped = path.stat().st_ino in {int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines()}
    assert mapped == (system == "posix")
    assert found.sum() == 2**16


def test_stand_ins_are_gone_afterwards(tmp_path):
    torch.save({"a": argparse.Namespace()}, tmp_path / "x.pth")
    before = torch.serialization.get_safe_globals()
    found = torch_file.load(tmp_path / "x.pth")["a"]
    assert torch.serialization.get_safe_globals() == before
    assert not isinstance(found, argparse.Namespace)
    assert type(found).__name__ == "Namespace"


@FORMATS
def test_plain_values_come_back(tmp_path, old):
    shared = [1]
    content = {"a": [1, 2.5, None, True, False, "ü", (1,), (1, 2, 3, 4), -1, 2**70], 7: {}, "b": [shared] * 3}
    content["c"] = OrderedDict([("b", 1), ("a", 2)])
    torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=not old)
    found = torch_file.load(tmp_path / "x.pth")
    assert found == content
    assert found["b"][0] is found["b"][1]
    assert list(found["c"]) == ["b", "a"]


@FORMATS
def test_tensors_come_back(tmp_path, old):
    base = torch.arange(24.0)
    state = {
        "float": torch.randn(2, 3),
        "half": torch.randn(4).half(),
        "bfloat": torch.randn(4).bfloat16(),
        "long": torch.arange(5),
        "bool": torch.tensor([True, False]),
        "view": base[4:16].view(3, 4).T,
        "other view": base[20:],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.0),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    path = tmp_path / "x.pth"
    torch.save(OrderedDict(state, args=argparse.Namespace()), path, _use_new_zipfile_serialization=not old)
    found = torch_file.load(path)
    assert list(found) == [*state, "args"]
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


class ListOfMine(list):
    """A list with a class of its own."""


@FORMATS
def test_what_training_scripts_save(tmp_path, old):
    """Objects of any class become stand-ins; the weights beside them are read."""
    weight = torch.randn(3, 2)
    content = {
        "args": argparse.Namespace(lr=1e-3, betas=[1, 2]),
        "best": np.float64(82.1),
        "array": np.arange(5),
        "table": defaultdict(list, a=[1]),
        "losses": deque([1.0, 2.0], maxlen=5),
        "list": ListOfMine([1, 2]),
        "output": Path("a/b"),
        "started": datetime.datetime(2024, 1, 1),
        "schedule": partial(max, 1),
        "class": ListOfMine,
        "kinds": {torch.float32, torch.float16},
        "model": OrderedDict(w=weight),
    }
    path = tmp_path / "x.pth"
    yacs_save(content, path, _use_new_zipfile_serialization=not old)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    with pytest.raises(linvit.UserError, match=r"so it is not opened: it names argparse\.Namespace"):
        torch_file.load(path, objects=False)
    found = torch_file.load(path)
    assert found.keys() == {*content, "config"}
    assert torch.equal(found["model"]["w"], weight)


@FORMATS
@pytest.mark.parametrize("fraction", [0.99, 0.5, 0.1, 0.01, 0])
def test_a_truncated_file(tmp_path, old, fraction):
    path = tmp_path / "x.pth"
    content = {"model": {"w": torch.ones(1000)}, "x": argparse.Namespace()}
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    data = path.read_bytes()
    path.write_bytes(data[: int(fraction * len(data))])
    with pytest.raises(linvit.UserError, match="is incomplete or not a checkpoint"):
        torch_file.load(path)


def test_a_torchscript_program_is_not_run(tmp_path):
    path = tmp_path / "x.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), path)
    with pytest.raises(linvit.UserError, match="is a TorchScript program, which is not run"):
        torch_file.load(path)


def tensor(offset, count):
    """A tensor of `count` numbers from `offset` on, in a storage of four that the file does not have."""
    name, key, place = bombs.text("storage"), bombs.text("0"), bombs.text("cpu")
    stored = b"(" + name + bombs.named("torch", "FloatStorage") + key + place + b"J" + struct.pack("<i", 4) + b"tQ"
    where = b"J" + struct.pack("<i", offset) + b"J" + struct.pack("<i", count) + b"\x85K\x01\x85"
    return bombs.named("torch._utils", "_rebuild_tensor_v2") + b"(" + stored + where + b"tR"


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"R", b"K\x01u", b"h\x07", b"}(K\x01u", b"h\x07R", tensor(4, 4), tensor(-1, 2)),
        bombs.named("a", "b\0c"),
        bombs.named("torch._utils", "_rebuild_tensor_v2") + b")R",
    ],
    ids=range(10),
)
def test_a_pickle_that_makes_no_sense(tmp_path, data):
    path = tmp_path / "x.pth"
    bombs.as_zip(path, b"\x80\x02" + data + b".")
    with pytest.raises(linvit.UserError, match="is incomplete or not a checkpoint"):
        torch_file.load(path)


def test_another_protocol_is_named(tmp_path):
    torch.save({"model": {}}, tmp_path / "x.pth", pickle_protocol=4)
    with pytest.raises(linvit.UserError, match=r"in pickle protocol 2, .* Unsupported operand 149\. Save the weights"):
        torch_file.load(tmp_path / "x.pth")


def test_a_file_that_names_too_much_is_refused(tmp_path):
    """Every name costs another pass, so a long list of them would keep the reader busy for ever."""
    names = b"".join(bombs.named("module", f"name{i}") + b"0" for i in range(2 * torch_file.MAX_STAND_INS))
    bombs.as_zip(tmp_path / "x.pth", b"\x80\x02" + names.replace(b"0c", b"c") + b"}.")
    with pytest.raises(linvit.UserError, match=f"it names module.name{torch_file.MAX_STAND_INS}"):
        torch_file.load(tmp_path / "x.pth")
