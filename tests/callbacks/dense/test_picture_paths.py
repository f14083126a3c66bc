"""Where the files of predicted images go."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from linvit.callbacks import predictions
from linvit.callbacks.predictions import PicturePaths


def test_folders_below_the_source_are_kept_however_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "photos" / "roofs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for source in ("photos", "./photos", str(tmp_path / "photos")):
        paths = PicturePaths(Path("out"), source)
        assert paths(str(tmp_path / "photos" / "roofs" / "a.png"), 0) == paths.folder / "roofs" / "a"


def test_a_name_that_comes_twice_gets_a_number(tmp_path):
    paths = PicturePaths(tmp_path, "hub:owner/photos")
    assert [path.name for path in map(paths, ["x/a.png", "y/a.jpg", "b.png"], range(3))] == ["a", "a_2", "b"]


def test_two_ranks_never_write_one_file(tmp_path):
    """Each knows its own images alone."""
    names = ["x/a.png", "y/a.jpg", str(tmp_path / "photos" / "a.png"), str(tmp_path / "photos" / "a.jpg")]
    paths = [PicturePaths(tmp_path, str(tmp_path / "photos"), alone=False)(name, i) for i, name in enumerate(names)]
    assert [path.name for path in paths] == ["a_0", "a_1", "a.png", "a.jpg"]


def test_no_file_takes_the_place_of_another(tmp_path):
    """Nor the legend, which is written beside them, that of a mask."""
    paths = PicturePaths(tmp_path, None)
    found = [paths(name, 0).name for name in ("a/1.png", "b/1.png", "c/1_2.png", "d/1.png", "legend.png", "1_2_2.png")]
    assert found == ["1", "1_2", "1_2_2", "1_3", "legend_2", "1_2_2_2"]


def test_names_that_windows_refuses(tmp_path, monkeypatch):
    assert PicturePaths(tmp_path, None)("12:30.png", 3).name == "12:30"
    monkeypatch.setattr(predictions, "os", SimpleNamespace(name="nt"))
    assert PicturePaths(tmp_path, None)("12:30.png", 3).name == "3"


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", ["..", "/", ".", "..png", "a\0b.png", "x/..", "SOURCE/../../x.png", "SOURCE"])
def test_names_of_tables_lead_nowhere_else(tmp_path, name, alone):
    paths = PicturePaths(tmp_path, str(tmp_path / "photos"), alone)
    path = paths(name.replace("SOURCE", str(tmp_path / "photos")), 3)
    assert path == paths.folder / ("3" if alone else "3_3")
