"""`linvit list` through the real command line, built-ins only; tests/test_plugin.py has the plug-ins."""

import re

import pytest

import linvit
from linvit.cli.list import main
from linvit.registry import attentions, backbones, heads
from linvit.registry.signatures import descriptions, parameters_of
from tests.plugin.distributions import python, write_distribution


def linvit_list(*arguments, **options):
    return python("-m", "linvit", "list", *arguments, **options)


def sections(text):
    """First word of the section's title -> its lines."""
    blocks = (block.splitlines() for block in text.strip().split("\n\n"))
    return {block[0].split()[0]: block[1:] for block in blocks}


@pytest.fixture
def wide(monkeypatch):
    """A terminal in which every row fits on a line."""
    monkeypatch.setenv("COLUMNS", "200")


def test_three_sections_with_every_name_and_summary(wide):
    done = linvit_list()
    assert done.returncode == 0
    assert done.stderr == ""
    found = sections(done.stdout)
    assert list(found) == ["attentions", "backbones", "heads"]
    for kind, names in (("attentions", linvit.list_attentions()), ("backbones", linvit.list_backbones())):
        assert [line.split()[0] for line in found[kind]] == names
    focused = next(line for line in found["attentions"] if line.split()[0] == "focused")
    assert focused.endswith("Focused linear attention with a depthwise convolution of the values, O(N d^2).")


def test_attentions_with_cost_class_and_paper(wide, capsys):
    assert main(["attentions"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split() == ["attentions", "cost", "paper", "summary"]
    cost, paper, summary = (title.index(word) for word in ("cost", "paper", "summary"))
    for line in lines:
        mechanism = linvit.registry.attentions.get(line.split()[0])
        assert line[cost:paper].strip() == mechanism.facts.complexity
        assert re.fullmatch(r"[\w-]+ (et al\.|and \w+) \d{4}", line[paper:summary].strip()), line
        assert line[summary:] == mechanism.__doc__.partition("\n")[0]


def test_backbones_with_size_and_published_accuracy(wide, capsys):
    assert main(["backbones", "--filter", "flatten_*"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert re.split("  +", title) == ["backbones", "params (M)", "MACs (G)", "published top-1 (%)", "summary"]
    found = {line.split()[0]: line.split() for line in lines}
    assert list(found) == linvit.list_backbones("flatten_*")
    assert found["flatten_swin_tiny"][1:4] == ["29.2", "4.48", "82.1"]
    assert found["flatten_deit_small"][1:4] == ["23.0", "4.36", "DeiT,"]  # no accuracy is published
    assert len({line.index(".") for line in lines}) == 1, "numbers are not aligned"


def test_where_an_accuracy_is_published(capsys):
    assert main(["backbones", "flatten_swin_tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  29,192,384 parameters with 1000 classes" in lines
    assert "  4.483 G multiply-accumulates at 224x224" in lines
    assert lines[4:6] == ["  published top-1 on ImageNet-1K: 82.1 %,", "  LeapLabTHU/FLatten-Transformer: README.md"]


def test_heads(wide, capsys):
    assert main(["heads"]) == 0
    (line,) = [line for line in sections(capsys.readouterr().out)["heads"] if line.split()[0] == "upernet"]
    assert "Xiao et al. 2018" in line
    assert "UPerNet with an auxiliary FCN" in line
    assert main(["heads", "upernet"]) == 0
    options = capsys.readouterr().out.partition("\noptions:\n")[2].splitlines()
    assert "  width = 512" in options
    assert not {"channels", "reductions", "num_classes"} & {line.split()[0] for line in options}


def test_a_wildcard(wide, capsys):
    assert main(["--filter", "*nano*"]) == 0
    found = sections(capsys.readouterr().out)
    assert [line.split()[0] for line in found["backbones"]] == ["deit_nano"]
    assert found["attentions"] == [f"  no name of {len(linvit.list_attentions())} matches '*nano*'"]


def test_one_attention_in_full(capsys):
    assert main(["attentions", "focused"]) == 0
    out = capsys.readouterr().out
    assert "from linvit.attention.focused:FocusedAttention, linvit\n" in out
    assert "Han et al. 2023" in out  # the module's docstring
    assert "focusing_factor: The power p >= 1" in out  # the class's
    options = out.partition("\noptions:\n")[2].splitlines()
    assert "  focusing_factor = 3" in options
    assert "  norm_scope = 'all_heads'" in options
    assert not {"dim", "num_heads", "grid", "key_dim"} & {line.split()[0] for line in options}


def test_every_option_is_described_by_its_class_or_a_parent(capsys):
    for registry in (attentions, backbones, heads):
        for name in registry.names():
            known = descriptions(constructor := registry.get(name))
            assert not parameters_of(constructor).keys() - known.keys() - set(registry.supplied), name
    assert main(["heads", "mask_rcnn"]) == 0
    assert "max_detections = 100\n      Maximum number of detections per image." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["attention"],
            "kind must be one of attentions, backbones, heads, configs; got 'attention'. Did you mean 'attentions'?",
        ),
        (["attentions", "focussed"], "no attention is called 'focussed'. Did you mean 'focused'?"),
        (["attentions", "focused", "--filter=f*"], "--filter is for lists, not for the one name 'focused'."),
    ],
)
def test_mistakes_are_user_errors(arguments, message, capsys):
    with pytest.raises(linvit.UserError) as error:
        main(arguments)
    assert str(error.value).startswith(message)
    assert capsys.readouterr().out == ""


def test_a_conflict_names_both_owners(tmp_path, wide):
    for owner in ("a", "b"):
        entry_points = f"[linvit.attentions]\nmine = {owner}:Mine\n"
        write_distribution(tmp_path, f"linvit-{owner}", "1.0", entry_points, **{owner: "class Mine: pass\n"})
    done = linvit_list("attentions", path=tmp_path)
    assert done.returncode == 0
    line = next(line for line in done.stdout.splitlines() if line.startswith("  mine "))
    assert "conflict: " in line
    assert "linvit-a 1.0 (a:Mine)" in line
    assert "linvit-b 1.0 (b:Mine)" in line


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["list", "configs"], ["--help"]],
    ids=" ".join,
)
def test_no_torch_for_what_needs_none(arguments):
    code = (
        "import sys\nfrom linvit.cli import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as stop:\n    code = stop.code\n"
        "assert not code, code\n"
        "heavy = {'torch', 'numpy', 'timm', 'lightning', 'jsonargparse'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = python("-c", code, *arguments)
    assert done.returncode == 0, done.stderr
