"""Any change of a file is noticed before it is loaded."""

import random
import struct
import zipfile

import pytest
import torch

import linvit
from linvit import checksum
from linvit.callbacks.save_checkpoints import AtomicCheckpointIO
from linvit.weights import torch_file

CONTENT = {"a": torch.arange(30_000.0), "b": [1, {"c": "x"}], "empty": torch.empty(0)}


@pytest.fixture
def file(tmp_path):
    AtomicCheckpointIO().save_checkpoint(CONTENT, tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


def is_noticed(path):
    with pytest.raises(linvit.UserError, match=r"damaged|incomplete") as error:
        torch_file.load(path)
    return str(path) in str(error.value)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_and_zip_programs_open_it(file, mmap):
    assert torch.equal(torch.load(file, weights_only=True, mmap=mmap)["a"], CONTENT["a"])
    with zipfile.ZipFile(file) as archive:
        assert archive.comment.startswith(b"linvit sha256 ")
        assert archive.testzip() is None
    checksum.verify(file)


def test_a_bit_flipped_anywhere(file):
    """In the content, the padding, the directory, the checksum and its label."""
    whole = bytearray(file.read_bytes())
    places = random.Random(0).sample(range(len(whole)), 100)
    for place in [0, *places, *range(len(whole) - 22 - checksum.COMMENT, len(whole))]:
        whole[place] ^= 1 << place % 8
        file.write_bytes(whole)
        assert is_noticed(file), place
        whole[place] ^= 1 << place % 8


def test_a_page_of_zeros(file):
    whole = file.read_bytes()
    for start in range(0, len(whole), 4096):
        page = whole[start : start + 4096]
        file.write_bytes(whole[:start] + bytes(len(page)) + whole[start + 4096 :])
        assert is_noticed(file) or not any(page)


@pytest.mark.parametrize("sixteenth", range(16))
def test_a_truncated_file(file, sixteenth):
    file.write_bytes(file.read_bytes()[: sixteenth * file.stat().st_size // 16])
    assert is_noticed(file)


@pytest.mark.parametrize("cut", [1, 63, 64, 70, 78, 79, 80, 81, 99, 100])
def test_an_end_that_is_missing(file, cut):
    file.write_bytes(file.read_bytes()[:-cut])
    assert is_noticed(file)


class TestWithoutOne:
    """A file of another program."""

    @pytest.fixture
    def file(self, tmp_path):
        torch.save(CONTENT, tmp_path / "x.pth")
        return tmp_path / "x.pth"

    def test_it_is_opened(self, file):
        assert torch.equal(torch_file.load(file)["a"], CONTENT["a"])

    def test_a_bit_flipped_in_the_weights(self, file):
        whole = bytearray(file.read_bytes())
        whole[len(whole) // 2] ^= 1
        file.write_bytes(whole)
        assert is_noticed(file)

    def test_torch_may_have_left_the_crc_out(self, file):
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(CONTENT, file)
        finally:
            torch.serialization.set_crc32_options(True)
        assert torch.equal(torch_file.load(file)["a"], CONTENT["a"])

    def test_the_old_format_has_none(self, tmp_path):
        torch.save(CONTENT, tmp_path / "x.pth", _use_new_zipfile_serialization=False)
        checksum.verify(tmp_path / "x.pth")

    def test_the_comment_is_counted(self, file):
        """The length that a zip file says its comment has is the length it has."""
        whole = file.read_bytes()
        file.write_bytes(whole[:-2] + struct.pack("<H", 5) + b"other")
        assert is_noticed(file)
