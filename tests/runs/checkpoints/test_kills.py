"""A run that is killed again and again; `python -m tests.runs.checkpoints.kills` does it 200 times and counts."""

import pytest

from tests.runs.checkpoints import kills


@pytest.mark.slow
def test_no_run_is_lost_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert kills.main(["--kills", "8", "--real", "1"]) == 0
