"""`linvit fit --help` is short; `--help=all` is complete."""

import os
import re

import pytest

from linvit.cli import main
from linvit.cli.training import VERBS
from linvit.cli.training.command_line import option_rows
from linvit.cli.training.help import OPTIONS
from tests.plugin.distributions import python


@pytest.mark.parametrize("verb", VERBS)
def test_the_options_that_matter(verb, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    assert main([verb, "--help"]) == 0
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


def test_the_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom linvit.cli import main\nassert main(['fit', sys.argv[1]]) == 0\n"
        "heavy = {'torch', 'numpy', 'timm', 'lightning', 'jsonargparse'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = python("-c", code, "--help")
    assert done.returncode == 0, done.stderr
    assert "--model.attention=" in done.stdout


def test_every_option_has_its_explanation(capsys):
    main(["fit", "--help"])
    options = capsys.readouterr().out.partition("A backbone or attention is")[0]
    entries = options.partition("  --")[2].split("\n  --")
    assert len(entries) > 30
    assert not [entry for entry in entries if not re.match(r"\S+( \S+\))?\s+\w", entry)]
