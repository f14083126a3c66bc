"""`linvit predict --model RUN`: options, and what is said of bad ones."""

import io
import re
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.cli import runs
from tests.cli.runs import linvit


class Terminal(io.StringIO):
    """What somebody looks at."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nowhere.ckpt", "a.png"], "checkpoint 'nowhere.ckpt' does not exist"),
        (["--model", "RUN"], "the following arguments are required: IMAGE"),
        (["--model", "RUN", "a.png", "--output", "text.png/x"], "Choose another one with --output"),
        (["--model", "RUN", "text.png"], "text.png' cannot be predicted: not an image of the formats"),
        (["--model", "RUN", "text.png", "--on_error=skip"], "no image in 'text.png' can be predicted"),
        (["--model", "RUN", "a.png", "--data.sizes=3"], "an option of preprocessing must be one of"),
        (["--model", "RUN", "a.png", "--model.window=3"], "cannot be used: TypeError"),
        (["--model", "RUN", "a.png", "--model.compile=true"], "the task has no option 'compile'"),
        (["--model", "RUN", "a.png", "--device=tpu"], "--device tpu cannot be used"),
        (["--model", "RUN", "a.png", "--weights=ema"], "has no moving average of the weights"),
    ],
)
def test_mistakes_are_named(run, tmp_path, arguments, said):
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    done = linvit("predict", *[str(run.folder) if word == "RUN" else word for word in arguments], cwd=tmp_path)
    assert done.code == 2
    assert said in done.err


def test_a_folder_is_predicted_without_what_cannot_be_read(run, tmp_path):
    photos = tmp_path / "photos"
    (photos / "more").mkdir(parents=True)
    (photos / "b.png").write_text("no image")
    for name in ("a.jpg", "more/c.png"):
        Image.new("L", (9, 12), 40).save(photos / name)
    done = linvit("predict", f"--model={run.folder}", "photos", "--on_error=skip", cwd=tmp_path)
    assert done.code == 0, done.err
    assert re.fullmatch(r"linvit: warning: '.*b.png' cannot be predicted: .*; it is skipped\n", done.err)
    (table,) = (tmp_path / "predictions").glob("predictions_photos*.csv")
    assert done.out == f"wrote the predictions to predictions/{table.name}\n"
    rows = table.read_text(encoding="utf-8").splitlines()[1:]
    assert [row.partition(",")[0] for row in rows] == [str(photos / name) for name in ("a.jpg", "more/c.png")]


def test_on_a_terminal_it_shows_how_far_it_is(run, tmp_path, monkeypatch):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        Image.new("L", (9, 12), 40).save(photos / f"{number}.png")
    monkeypatch.setattr(runs, "io", SimpleNamespace(StringIO=Terminal))
    done = linvit("predict", f"--model={run.folder}", "photos", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "3/3" in done.err
