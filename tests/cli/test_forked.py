"""Processes that are forked from the tests."""

import atexit
import tempfile
from pathlib import Path

from tests.cli.forked import Ranks


def test_a_forked_process_leaves_to_its_parent_what_that_does_at_its_end(tmp_path):
    parents = tempfile.TemporaryDirectory(dir=tmp_path)
    done = [Path(parents.name, "inside"), tmp_path / "parent's", tmp_path / "own"]
    done[0].touch()
    atexit.register(done[1].touch)
    try:
        ranks = Ranks([], tmp_path, call=lambda: bool(atexit.register(done[2].touch)) - 1)
        assert ranks.wait() == [0]
    finally:
        atexit.unregister(done[1].touch)
    assert [path.exists() for path in done] == [True, False, True]
