"""A run over damaged data: what is skipped, said and written, as the command line does it."""

import csv
import re
import warnings
from types import SimpleNamespace

import pytest

from linvit.callbacks import BadImageCount
from linvit.data.sources.read import BadImageError, BadImages
from tests.cli.runs import QUICKSTART, linvit, tiny
from tests.data.damaged import damaged


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("set") / "damaged"


@pytest.fixture(scope="module")
def bad(root):
    return sorted(str(root / path) for path, wrong in damaged(root, good=20).items() if wrong is not None)


def fit(root, cwd, **options):
    given = {"trainer__limit_train_batches": 1.0, "data__batch_size": 4, "data__num_workers": 0, "data__img_size": 16}
    return linvit("fit", "--config", QUICKSTART, *tiny(data__source=root, **{**given, **options}), cwd=cwd)


def test_every_bad_image_is_named_once_in_the_run_folder(root, bad, tmp_path):
    with pytest.warns(UserWarning, match="training images could not be decoded") as told:
        done = fit(root, tmp_path, data__max_bad_fraction=0.5, data__num_workers=2)
    assert done.code == 0
    report = next(tmp_path.glob("checkpoints/*/version_0/bad_images.csv"))
    with report.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["image", "reason"]
    assert sorted(name for name, _ in rows) == bad
    messages = [str(warning.message) for warning in told if "could not be decoded" in str(warning.message)]
    counts = [int(re.fullmatch(r"epoch \d: (\d+) .* so far.* named in '(.*)'", text)[1]) for text in messages]
    assert counts == sorted({*counts})  # an epoch that meets no other is silent
    assert counts[-1] == len(bad)


def test_too_many_end_the_run_with_a_way_out(root, bad, tmp_path):
    done = fit(root, tmp_path)
    assert done.code == 2
    report = next(tmp_path.glob("checkpoints/*/version_0/bad_images.csv"))
    assert re.match(r"linvit: error: 6 of the \d+ training images cannot be decoded, .* the last is /.*\(", done.err)
    for part in (f"listed in '{report}'", "linvit data check PATH", "--data.max_bad_fraction"):
        assert part in done.err


def test_rank_0_warns_of_what_all_have_named(tmp_path):
    report = tmp_path / "bad_images.csv"
    ranks = [BadImages("skip", 1.0) for _ in range(3)]
    for rank, account in enumerate(ranks):
        account.start(10)
        account.report = report
        account.record(BadImageError(f"{rank % 2}.jpg", "bad"))
    module, count = SimpleNamespace(bad_images=ranks[0]), BadImageCount()
    trainer = SimpleNamespace(datamodule=module, is_global_zero=True, current_epoch=7)
    with pytest.warns(UserWarning, match=r"^epoch 7: 2 training images could not be decoded so far, and others took"):
        count.on_train_epoch_end(trainer, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count.on_train_epoch_end(trainer, None)
        BadImageCount().on_train_epoch_end(SimpleNamespace(datamodule=module, is_global_zero=False), None)


def test_a_stream_is_trained_on_with_another_order_in_every_epoch(tmp_path, monkeypatch):
    epochs = []
    monkeypatch.setattr(
        "linvit.data.sources.stream.Stream.set_epoch", lambda self, epoch: epochs.append((self.seed, epoch))
    )
    done = linvit(
        "fit", "--config", QUICKSTART, *tiny(data__streaming=True, data__num_workers=0, seed_everything=5), cwd=tmp_path
    )
    assert done.code == 0, done.err
    assert [epoch for seed, epoch in epochs if seed == 5] == [0, 1]
