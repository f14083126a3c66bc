"""Layouts by name give the lists of specs that they stand for, and refuse what does not fit a network."""

import pytest

import linvit
from linvit import UserError
from linvit.backbones.stage import specs_per_block
from linvit.cli.list import main
from linvit.registry.layouts import LAYOUTS, block_kinds


def letters(name, depth, full=None):
    return "".join(kind[0] for kind in block_kinds(name, depth, full))


def test_kinds_of_blocks():
    assert letters("vitdet", 12) == "wwfwwfwwfwwf"  # ViTDet-B: 2, 5, 8, 11
    assert [i for i, kind in enumerate(letters("vitdet", 24)) if kind == "f"] == [5, 11, 17, 23]
    assert letters("jetvit", 12) == "lwlwlwlflwfw"
    assert [i for i, kind in enumerate(letters("jetvit", 24)) if kind == "f"] == [14, 22]
    assert letters("jetvit", 5, [1]) == "lflwl"
    assert letters("vitdet", 4, [0]) == "fwww"  # its own full blocks become windows
    assert letters("first_half", 5) == "fflll"
    assert letters("last_half", 5) == "llfff"


def test_a_layout_is_a_list_over_all_stages():
    focused = {"name": "focused", "focusing_factor": 4}
    assert specs_per_block({"layout": "last_half", "linear": focused}, [1, 3]) == [focused] * 2 + ["softmax"] * 2
    windows = {"name": "window", "window_size": 7}
    assert specs_per_block({"layout": "jetvit", "window": 7, "full": [2]}, [4]) == [
        "linear",
        windows,
        "softmax",
        windows,
    ]


def names(model):
    return [type(block.attn.mechanism).__name__ for block in model.blocks]


def test_networks_are_built_and_converted_by_a_layout():
    want = ["SoftmaxAttention", "SoftmaxAttention", "LinearAttention", "LinearAttention"]
    spec = {"layout": "first_half", "linear": {"name": "linear", "feature_map": "relu"}}
    deit = {"name": "deit_tiny", "depth": 4, "img_size": 32}
    assert names(linvit.create_backbone(deit, attention=spec, num_classes=2)) == want
    softmax = linvit.create_backbone(deit, num_classes=2)
    assert names(linvit.replace_attention(softmax, spec)) == want


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"layout": "jetvt"}, "layout.*jetvit"),
        ({"layout": "vitdet", "linear": "focused"}, "layout 'vitdet' takes no option 'linear'"),
        ({"layout": "jetvit", "windows": 7}, "takes no option 'windows'. Did you mean 'window'"),
        ({"layout": "jetvit", "window": 0}, "window must be .*; got 0"),
        ({"layout": "jetvit"}, "networks of 12 and 24 blocks; this one has 4. Write {layout: jetvit, full: "),
        ({"layout": "jetvit", "full": [4]}, "full: a block must be .*; got 4"),
        ({"layout": "jetvit", "full": "all"}, "full must be a list of blocks"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(spec, message):
    with pytest.raises(UserError, match=message):
        specs_per_block(spec, [4])


def test_list_shows_layouts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["attentions", "--layouts"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split()[0] == "layouts"
    assert [line.split()[0] for line in lines[: len(LAYOUTS)]] == list(LAYOUTS)
    assert "LWLWLWLFLWFW" in lines[0]
    with pytest.raises(UserError, match="--layouts is for attentions"):
        main(["backbones", "--layouts"])
