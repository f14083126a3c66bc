"""Any change of what a file holds is noticed before it is loaded, by the CRC-32 of the entries of a zip file."""

import random
import re
import struct

import pytest
import torch

import linvit
from linvit.callbacks.save_checkpoints import AtomicCheckpointIO
from linvit.weights import torch_file

CONTENT = {"a": torch.arange(30_000.0), "b": [1, {"c": "x"}], "empty": torch.empty(0)}


@pytest.fixture
def file(tmp_path):
    AtomicCheckpointIO().save_checkpoint(CONTENT, tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


def is_noticed(path):
    """True if a file is refused; one that is not must hold what was written."""
    try:
        found = torch_file.load(path)
    except linvit.UserError as error:
        said = str(error)
    else:
        assert all(torch.equal(found[name], CONTENT[name]) for name in ("a", "empty"))
        assert found["b"] == CONTENT["b"]
        return False
    assert re.search(r"damaged|incomplete", said)
    assert str(path) in said
    return True


def test_bits_flipped_anywhere(file):
    """In the content and the directory; padding and dates of entries may be other ones."""
    whole = bytearray(file.read_bytes())
    noticed = 0
    for place in [0, *random.Random(0).sample(range(len(whole)), 100), *range(len(whole) - 22, len(whole))]:
        whole[place] ^= 1 << place % 8
        file.write_bytes(whole)
        noticed += is_noticed(file)
        whole[place] ^= 1 << place % 8
    assert noticed > 95


def test_a_page_of_zeros(file):
    whole, noticed = file.read_bytes(), 0
    for start in range(0, len(whole), 4096):
        page = whole[start : start + 4096]
        file.write_bytes(whole[:start] + bytes(len(page)) + whole[start + 4096 :])
        noticed += is_noticed(file)
    assert noticed >= len(whole) // 4096 - 1


def test_a_truncated_file(file):
    whole = file.read_bytes()
    for kept in (
        *(sixteenth * len(whole) // 16 for sixteenth in range(16)),
        *(-cut for cut in (1, 2, 21, 22, 23, 100)),
    ):
        file.write_bytes(whole[:kept])
        assert is_noticed(file)


def test_torch_may_have_left_the_crc_out(file):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(CONTENT, file)
    finally:
        torch.serialization.set_crc32_options(True)
    assert not is_noticed(file)


def test_the_old_format_has_none(file):
    torch.save(CONTENT, file, _use_new_zipfile_serialization=False)
    assert not is_noticed(file)


def test_a_file_of_linvit_0_2_has_a_comment(file):
    """With another checksum, which nobody reads any more."""
    comment = b"linvit sha256 " + b"0" * 64
    file.write_bytes(file.read_bytes()[:-2] + struct.pack("<H", len(comment)) + comment)
    assert not is_noticed(file)
