"""What stands in class names, file names and checkpoints, where it is shown and written."""

import ast
import csv
import io
import logging
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

import linvit
from linvit import UserError, cli
from linvit.data.sources.read import name_of
from linvit.io.plain_text import PrintableStream, markdown_code, markdown_text, printable, write_csv
from linvit.registry.entries import Entry
from linvit.runs.library_messages import LOGGER, hide_library_messages
from linvit.weights.load import Report

ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\u202egpj.exe\r"


def test_markdown_of_a_text_is_the_text():
    """Nothing of it is HTML, a link, code or emphasis."""
    given = ["<img src=x>", "a&lt;b", "[x](http://y.z)", "![x][y]", "`x`", "*x* _y_ ~~z~~", "www.x.y", "a|b", r"a\|b"]
    wanted = [
        *(r"\<img src=x>", r"a\&lt;b", r"\[x\](http\://y.z)", r"!\[x\]\[y\]", r"\`x\`"),
        *(r"\*x\* \_y\_ \~~z\~~", r"www\.x.y", r"a\|b", r"a\\\|b"),
    ]
    assert [markdown_text(text) for text in given] == wanted
    plain = ["val/ema_score", "+0.01 [-0.02, +0.04] *", r"C:\x.jpg", "a: b"]
    assert [markdown_text(text) for text in plain] == plain
    assert [markdown_code(text) for text in ("x", "a`b", "``")] == ["`x`", "`` a`b ``", "``` `` ```"]


def test_control_characters_are_written_out():
    assert printable(ESCAPES) == r"\x1b]0;title\x07\x1b[2J\x9b31m\u202egpj.exe\r"
    assert printable("a\nb", lines=False) == r"a\nb"


def test_whatever_is_shown_is_printable(capsys):
    """Errors, names of images, reports of weights, and information of a run."""
    hide_library_messages()
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger(LOGGER).addHandler(handler)
    logging.getLogger(LOGGER).warning("it is %s", ESCAPES)
    logging.getLogger(LOGGER).removeHandler(handler)
    shown = [
        said.getvalue().rstrip("\n"),
        str(UserError(ESCAPES)),
        name_of({"bytes": None, "path": ESCAPES}, "row 3"),
        str(Report("x", ESCAPES, unexpected=[ESCAPES])),
    ]
    for text in shown:
        assert "gpj.exe" in text
        assert text == printable(text)


def test_every_verb_prints_through_one_stream(capsys, monkeypatch):
    """All that a verb, a library or Python itself prints, with text from data in it."""

    def say(argv):
        print(ESCAPES, ESCAPES, file=sys.stderr)
        sys.stdout.writelines([ESCAPES])
        logging.StreamHandler().emit(logging.makeLogRecord({"msg": ESCAPES}))
        tqdm.write(ESCAPES)
        print("\udcff of a file name")
        sys.excepthook(ValueError, ValueError(ESCAPES), None)
        raise UserError(ESCAPES)

    monkeypatch.setattr(Entry, "load", lambda entry, kind: say)
    for verb in cli.OWN:
        assert cli.main([verb]) == 2
        said = capsys.readouterr()
        assert said.out.count("gpj.exe") == 2
        assert said.err.count("gpj.exe") == 5
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*said.out, *said.err}, verb
        assert r"\udcff of a file name" in said.out


def test_a_progress_bar_moves_on_that_stream():
    plain, checked = io.StringIO(), io.StringIO()
    for stream in (plain, PrintableStream(checked)):
        for _ in tqdm(range(2), file=stream, bar_format="{n} of {total}", mininterval=0):
            for _ in tqdm(range(2), file=stream, bar_format="{n} of {total}", mininterval=0):
                pass
    assert checked.getvalue() == plain.getvalue()
    assert {"\r", "\x1b"} <= {*plain.getvalue()}


def test_what_an_encoding_lacks_is_written_out():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    stream = PrintableStream(file)
    assert stream.write("0.5 ± 0.1") == 9
    stream.flush()
    assert file.buffer.getvalue() == rb"0.5 \xb1 0.1"


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "=1+1"),
        ("two\nlines", r"two\nlines"),
        ("\x1b[2J", r"\x1b[2J"),
        ("-0.5", "-0.5"),
        ('say "a", b', 'say "a", b'),
    ],
)
def test_a_row_is_a_line_of_texts_as_they_are(text, cell):
    file = io.StringIO()
    write_csv(file, [(text, -1.5, 3)])
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
    assert writing == {"plain_text.py", "loggers.py"}
