"""`linvit fit --help` is short; `--help=all` is complete."""

import os
import re
from pathlib import Path

import pytest

from linvit.cli import main
from linvit.cli.training import VERBS
from linvit.cli.training.command_line import option_rows
from linvit.cli.training.help import HELP, OPTIONS
from linvit.data.classification import ClassificationData
from linvit.runs.parser import options_of
from linvit.tasks import ClassificationTask
from tests.plugin.distributions import python


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_options_that_matter(verb, flag, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    assert main([verb, flag]) == 0
    out = capsys.readouterr().out
    assert f"usage: linvit {verb} " in out
    for option in (
        "--config",
        "--ckpt_path",
        "--model.attention=",
        "--model.lr=",
        "--data.source=",
        "--trainer.max_epochs=",
    ):
        assert option in out
    assert len(out.splitlines()) <= 75


def test_the_options_of_the_help_are_those_of_the_classes():
    lines = "".join(f"{option}\t{text}\n" for option, text in option_rows())
    if os.environ.get("LINVIT_WRITE_OPTIONS"):
        OPTIONS.write_text(lines, encoding="utf-8")
    assert OPTIONS.read_text(encoding="utf-8") == lines, (
        "run this test with LINVIT_WRITE_OPTIONS=1 and look at the diff"
    )


@pytest.mark.parametrize("flag", HELP)
def test_the_help_imports_nothing_heavy(flag):
    code = (
        "import sys\nfrom linvit.cli import main\nassert main(['fit', sys.argv[1]]) == 0\n"
        "heavy = {'torch', 'numpy', 'timm', 'lightning', 'jsonargparse'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = python("-c", code, flag)
    assert done.returncode == 0, done.stderr
    assert "--model.attention=" in done.stdout


def test_the_table_of_options_is_part_of_the_package():
    assert '"cli/training/options.tsv"' in (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")


def test_every_option_has_its_explanation(capsys):
    main(["fit", "--help"])
    options = capsys.readouterr().out.partition("A backbone or attention is")[0]
    entries = options.partition("  --")[2].split("\n  --")
    assert len(entries) > 30
    assert not [entry for entry in entries if not re.match(r"\S+( \S+\))?\s+\w", entry)]


def test_what_the_data_decides_is_not_offered(capsys):
    main(["fit", "--help"])
    out = capsys.readouterr().out
    assert "--model.num_classes" not in out
    assert "--data.num_classes" in out


def test_every_option_there_is(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--help=all"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for option in ("--trainer.gradient_clip_algorithm", "--checkpoint.monitor", "--model", "--data"):
        assert option in out


@pytest.mark.parametrize("owner", [ClassificationTask, ClassificationData])
def test_what_is_left_out_exists(owner):
    options = {name.rpartition(".")[2] for name in options_of(owner)}
    assert options > owner.advanced_options
    assert {"lr", "ema_decay", "compile", "source"}.isdisjoint(owner.advanced_options)


def test_options_are_found_through_forwarded_arguments_and_nested_ones():
    task, data = options_of(ClassificationTask), options_of(ClassificationData)
    assert task["mixup_alpha"].default == 0.0
    assert task["ema_decay"].default is None  # of the parent
    assert task["lr"].default == 1e-3  # of the settings that the parent forwards to
    assert task["lr"].help.startswith("Peak learning rate")
    assert data["augmentation.hflip"].default == 0.5
    assert "num_classes" in task
