"""What stands in class names, file names and checkpoints, where it is shown and written."""

import ast
import csv
import io
import logging
import warnings
from pathlib import Path

import pytest

import linvit
from linvit import UserError
from linvit.cli.training.messages import LOGGER, hide_library_messages
from linvit.data.sources.read import name_of
from linvit.plain_text import CsvWriter, printable
from linvit.weights.report import Report

ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\u202egpj.exe\r"


@pytest.mark.parametrize("text", ["ant", "日本 é", "two\nlines\tand a tab", "C:\\x.jpg"])
def test_ordinary_text_stays(text):
    assert printable(text) == text


def test_control_characters_are_written_out():
    assert printable(ESCAPES) == r"\x1b]0;title\x07\x1b[2J\x9b31m\u202egpj.exe\r"
    assert printable("a\nb", lines=False) == r"a\nb"


def test_whatever_is_shown_is_printable(capsys):
    """Errors, names of images, reports of weights, information and warnings of a run."""
    hide_library_messages()
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger(LOGGER).addHandler(handler)
    logging.getLogger(LOGGER).warning("it is %s", ESCAPES)
    logging.getLogger(LOGGER).removeHandler(handler)
    shown = [
        said.getvalue().rstrip("\n"),
        warnings.formatwarning(ESCAPES, UserWarning, "x.py", 1),
        str(UserError(ESCAPES)),
        name_of({"bytes": None, "path": ESCAPES}, "row 3"),
        str(Report("x", ESCAPES, unexpected=[ESCAPES])),
    ]
    for text in shown:
        assert "gpj.exe" in text
        assert text == printable(text)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1+cmd", "'+1+cmd"),
        ("-1+cmd", "'-1+cmd"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", r"'\t=1"),
        ("\r=1", r"'\r=1"),
        ("\uff1d1+1", "'\uff1d1+1"),
        ("two\nlines", r"two\nlines"),
        ("\x1b[2J", r"\x1b[2J"),
        ("-0.5", "-0.5"),
        ("a=b", "a=b"),
        ('say "a", b', 'say "a", b'),
    ],
)
def test_no_cell_is_a_formula(text, cell):
    file = io.StringIO()
    CsvWriter(file).writerows([(text, -1.5, 3)])
    assert list(csv.reader(io.StringIO(file.getvalue()))) == [[cell, "-1.5", "3"]]


def test_there_is_one_writer_of_tables():
    """metrics.csv has numbers alone, under names from the program."""
    root = Path(linvit.__file__).parent
    writing = {
        path.name
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("csv.writer", "csv.DictWriter")
    }
    assert writing == {"plain_text.py", "csv_logger.py"}
