"""A last checkpoint that is torn, flipped or partly zero is noticed, and a run resumes from another one."""

import random
import shutil

import pytest
import torch

from linvit.runs.checkpoint import whole_checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:--resume=auto skips")]
PAGE = 4096


def damages(whole):
    """Every sixteenth of the file; 100 flipped bits; 20 pages of zeros."""
    draw = random.Random(0)
    yield from (whole[: len(whole) * part // 16] for part in range(16))
    for _ in range(100):
        place, bit = draw.randrange(len(whole)), draw.randrange(8)
        yield whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
    used = [start for start in range(0, len(whole) - PAGE, PAGE) if any(whole[start : start + PAGE])]
    for start in draw.sample(used, 20):
        yield whole[:start] + bytes(PAGE) + whole[start + PAGE :]


def test_damage_of_what_it_holds_is_noticed_and_another_is_taken(run, tmp_path):
    folder = shutil.copytree(run.folder, tmp_path / "checkpoints" / "quickstart" / "version_0")
    last = folder / "checkpoints" / "last.ckpt"
    shutil.copy(last, other := folder / "checkpoints" / "other.ckpt")
    (folder / "checkpoints" / "best.ckpt").unlink()
    whole = last.read_bytes()
    assert next(whole_checkpoints(folder), None).path == last
    weights, noticed = torch.load(other, weights_only=True)["state_dict"], 0
    for content in damages(whole):
        last.write_bytes(content)
        found = next(whole_checkpoints(folder), None).path
        noticed += found == other
        if found == last:  # a bit of the padding between entries, or of their dates
            again = torch.load(last, weights_only=True)["state_dict"]
            assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    assert noticed >= 130
