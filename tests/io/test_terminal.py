"""What is printed fits the terminal."""

import contextlib

import pytest

from linvit.cli import OWN, main
from linvit.io.terminal import reflow, table

ROWS = [("  kind", "size (M)", "summary"), ("  a", "1", "Short."), ("  long_name", "10", "A longer sentence.")]


def test_columns_are_aligned_and_numbers_to_the_right():
    assert table(ROWS, 80) == [
        "  kind       size (M)  summary",
        "  a                 1  Short.",
        "  long_name        10  A longer sentence.",
    ]


def test_sentences_are_wrapped_beside_the_columns():
    text = "These words are too long for the forty characters that are left to them."
    assert table([*ROWS, ("  b", "2", text)], 63)[3:] == [
        "  b                 2  These words are too long for the forty",
        "                       characters that are left to them.",
    ]


def test_where_the_columns_leave_no_room_sentences_stand_beneath():
    assert table([*ROWS, ("  b", "2", "A longer sentence."), ("  c", "3", "Short.")], 40) == [
        *("  kind       size (M)", "      summary"),
        *("  a                 1", "      Short."),
        *("  long_name        10", "      A longer sentence."),
        *("  b                 2",),  # the sentence is that of the row above
        *("  c                 3", "      Short."),
    ]


def test_columns_as_wide_as_the_terminal_need_no_sentences():
    assert table([("name", "text", ""), ("a" * 10, "b" * 6, "")], 20) == ["name        text", f"{'a' * 10}  {'b' * 6}"]


def test_prose_is_wrapped_anew_and_short_lines_stay():
    full = "word " * 23 + "that"  # 119 characters
    notes = "Paper: Han 2023.\nCost: O(N).\n\nArgs:"
    text = f"{full}\ngoes on here.\n\n{notes}\n    name: {full[:100]}\n        and goes on.\n    b: Short."
    prose, rest = reflow(text, 64).split("\n\n", 1)
    assert prose.splitlines() == ["word " * 12 + "word", "word " * 10 + "that goes on", "here."]
    assert rest.splitlines() == [
        *notes.splitlines(),
        *("    name: " + "word " * 10 + "word", "        " + "word " * 9 + "and goes", "        on.", "    b: Short."),
    ]
    assert reflow(text, 120) == text


def printed(capsys, *arguments):
    with contextlib.suppress(SystemExit):
        main([*arguments])
    return capsys.readouterr().out


COMMANDS = [
    *([verb, "--help"] for verb in OWN if verb not in ("validate", "test")),
    *(["bench", "attention", "--help"], ["bench", "backbone", "--help"]),
    *(["--help"], ["fit", "--help=all"], ["data", "check", "--help"], ["list"], ["list", "configs"]),
    *(["list", "attentions", name] for name in ("focused", "mhla", "vittt")),
    *(["list", "backbones", name] for name in ("flatten_swin_tiny", "pvt_v2_b0", "soft_tiny", "timm")),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_no_line_is_wider_than_the_terminal(arguments, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, *arguments).splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert len(lines) > 3
