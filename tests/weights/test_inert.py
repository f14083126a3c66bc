"""The reader that runs nothing: what it gives back, and what it leaves alone."""

import argparse
import copyreg
import io
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch

import linvit
from linvit.weights import inert, torch_file
from tests.weights import bombs
from tests.weights.files import yacs_save


@pytest.fixture(autouse=True)
def extension():
    copyreg.add_extension(bombs.HERE, "New", bombs.EXTENSION)
    yield
    copyreg.remove_extension(bombs.HERE, "New", bombs.EXTENSION)


@pytest.fixture
def mark(tmp_path):
    """A file that is there if something ran."""
    path = tmp_path / "mark"
    yield path
    assert not path.exists()


def test_no_opcode_is_forgotten():
    """Those that the machine has no case for are plain values, which `genops` reads itself."""
    constants = set()
    for opcode in pickletools.opcodes:
        memo = {0: None}
        stack = [inert.MARK, {}, inert.MARK, "a", "b", "c", "d"]
        before = list(stack)
        argument = object() if opcode.name not in ("GLOBAL", "INST") else "os system"
        if "GET" in opcode.name:
            argument = 0
        inert.Machine(None).step(opcode.name, argument, stack, memo)
        if stack[:-1] == before and stack[-1] is argument:
            constants.add(opcode.name)
    kinds = {"INT", "LONG", "STRING", "BYTES", "UNICODE", "FLOAT"}
    assert constants == {
        opcode.name
        for opcode in pickletools.opcodes
        if any(kind in opcode.name.removeprefix("LONG_") for kind in kinds) or opcode.name == "BYTEARRAY8"
    }


@pytest.mark.parametrize("name", bombs.BOMBS)
@pytest.mark.parametrize("kind", bombs.FORMATS)
def test_a_bomb_does_not_go_off(tmp_path, mark, name, kind):
    path = tmp_path / "x.pth"
    bombs.FORMATS[kind](path, bombs.pickled(bombs.BOMBS[name](str(mark))))
    if kind == "pickle":
        with pytest.raises(linvit.UserError, match="not a checkpoint"):
            torch_file.read(path)
    else:
        content = torch_file.read(path)
        assert content["model"] == {}
        assert isinstance(content["config"], inert.Inert)


@pytest.mark.parametrize("name", bombs.BOMBS)
def test_each_bomb_is_live(tmp_path, name):
    path = tmp_path / "mark"
    pickle.loads(bombs.pickled(bombs.BOMBS[name](str(path))))
    assert path.exists()


OBJECTS = {
    "plain": {"a": [1, 2.5, None, True, False, "ü", b"x", (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), -1, 2**70], 7: {}},
    "shared": [[1]] * 3,
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "empty": {},
}


@pytest.mark.parametrize("content", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_come_back(content, protocol):
    data = pickle.dumps(content, protocol)
    assert inert.Machine(None).run(io.BytesIO(data)) == content or protocol < 3  # bytes are a call before protocol 3
    assert list(inert.Machine(None).run(io.BytesIO(data))) == list(content)


@pytest.mark.parametrize("old", [False, True], ids=["zip", "stream"])
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
    torch.save(OrderedDict(state), path, _use_new_zipfile_serialization=not old)
    found = torch_file.read(path)
    assert list(found) == list(state)
    for name, tensor in state.items():
        loaded = found[name].load()
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded, tensor)


@pytest.mark.parametrize("old", [False, True], ids=["zip", "stream"])
def test_what_training_scripts_save(tmp_path, old):
    """A yacs configuration, a namespace, numpy numbers, a defaultdict: inert; the weights beside them come."""
    weight = torch.randn(3, 2)
    content = {
        "args": argparse.Namespace(lr=1e-3, betas=[1, 2]),
        "best": np.float64(82.1),
        "array": np.arange(5),
        "table": defaultdict(list, a=[1]),
        "kinds": {torch.float32, torch.float16},
        "model": OrderedDict(w=weight),
    }
    path = tmp_path / "x.pth"
    yacs_save(content, path, _use_new_zipfile_serialization=not old)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    found = torch_file.read(path)
    assert {name for name, value in found.items() if isinstance(value, inert.Inert)} == content.keys() - {"model"} | {
        "config"
    }
    assert torch.equal(found["model"]["w"].load(), weight)


def whole(path, old=False):
    torch.save(
        {"model": {"w": torch.ones(1000)}, "x": argparse.Namespace()}, path, _use_new_zipfile_serialization=not old
    )
    return path.read_bytes()


@pytest.mark.parametrize("old", [False, True], ids=["zip", "stream"])
@pytest.mark.parametrize("share", [0.99, 0.5, 0.1, 0.01, 0])
def test_a_truncated_file(tmp_path, old, share):
    path = tmp_path / "x.pth"
    data = whole(path, old)
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(linvit.UserError, match="is incomplete or not a checkpoint"):
        torch_file.read(path)


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    path = tmp_path / "x.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))
    with pytest.raises(linvit.UserError, match="unpacks to more than its size"):
        torch_file.check_archive(path)


def test_a_torchscript_program_is_not_run(tmp_path):
    path = tmp_path / "x.pt"
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), path)
    with pytest.raises(linvit.UserError, match="is a TorchScript program, which is not run"):
        torch_file.check_archive(path)


def storage(kind="FloatStorage", key="0", count=4):
    return (
        b"("
        + bombs.text("storage")
        + bombs.named("torch", kind)
        + bombs.text(key)
        + bombs.text("cpu")
        + b"J"
        + struct.pack("<i", count)
        + b"tQ"
    )


def tensor(arguments):
    return bombs.named("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"


@pytest.mark.parametrize(
    "arguments",
    [b"", b"K\x01", storage(), storage() + bombs.text("x") + b"))", storage("EvalStorage") + b"K\x00))", b"NN))"],
    ids=str,
)
def test_a_rebuilder_with_odd_arguments_is_inert(arguments):
    data = b"\x80\x02" + tensor(arguments) + b"."
    assert isinstance(inert.Machine(None).run(io.BytesIO(data)), inert.Inert)


@pytest.mark.parametrize("place", [b"K\x04", b"J\xff\xff\xff\xff"], ids=["beyond", "before"])
def test_a_tensor_outside_its_storage_is_an_error(place):
    data = b"\x80\x02" + tensor(storage() + place + b"K\x04\x85K\x01\x85") + b"."
    found = inert.Machine(lambda _: torch.ones(4)).run(io.BytesIO(data))
    with pytest.raises(RuntimeError):
        found.load()


@pytest.mark.parametrize(
    "data", [b"\x80\x02.", b"\x80\x02R.", b"\x80\x02K\x01u.", b"\x80\x02h\x07.", b"\x80\x02}(K\x01u."], ids=repr
)
def test_a_malformed_pickle_is_a_user_error(tmp_path, data):
    path = tmp_path / "x.pth"
    bombs.as_zip(path, data)
    with pytest.raises(linvit.UserError, match="is incomplete or not a checkpoint"):
        torch_file.read(path)


def test_keys_that_are_objects_are_left_out():
    data = b"\x80\x02}(" + bombs.named("os", "system") + b"K\x01" + bombs.text("a") + b"K\x02" + b"u."
    assert inert.Machine(None).run(io.BytesIO(data)) == {"a": 2}
