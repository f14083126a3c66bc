"""`linvit list configs`."""

import pytest
import yaml

import linvit
from linvit.cli.list import main
from linvit.registry.model_info import CONFIGS
from linvit.runs.configs import names
from tests.cli.runs import linvit as command_line


def test_every_one_is_listed(capsys):
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in names()} == set(names())
    line = next(line for line in lines if line.startswith("  imagenet/swin_tiny "))
    assert line.split(maxsplit=1)[1].startswith("not yet run; published top-1 81.2")


def test_one_without_a_base_is_printed_as_it_is(capsys):
    assert main(["configs", "quickstart"]) == 0
    assert capsys.readouterr().out == (CONFIGS / "quickstart.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "imagenet/swin_tiny",
            [
                "# Expected: not yet run; published top-1 81.2 (microsoft/Swin-Transformer: MODELHUB.md)",
                "  max_epochs: 300  # base/imagenet/swin",
                "    backbone: swin_tiny",
            ],
        ),
        (
            "coco/soft_norm_small_mask_rcnn_1x",
            [
                "# Expected: not yet run; published box AP 43.8, mask AP 40.1 (fudan-zvg/SOFT: README.md)",
                "    decay_epochs: [8, 11]  # base/coco/pvt_mask_rcnn",
                "    backbone: {depths: [1, 3, 7, 4], name: soft_norm_small}",
            ],
        ),
    ],
)
def test_one_is_printed_with_its_base_and_the_file_of_each_value(name, lines, capsys, tmp_path):
    assert main(["configs", name]) == 0
    text = capsys.readouterr().out
    assert set(lines) <= set(text.splitlines())
    (tmp_path / "whole.yaml").write_text(text, encoding="utf-8")
    fit = ("fit", "--print_config", "--config")
    whole, own = (command_line(*fit, config, cwd=tmp_path) for config in ("whole.yaml", name))
    assert whole.code == 0, whole.err
    assert yaml.safe_load(whole.out) == yaml.safe_load(own.out)


def test_a_copy_works_by_itself(tmp_path):
    name = "imagenet/flatten_swin_tiny"
    done = command_line("list", "configs", name, "--output", "mine.yaml", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.endswith("  linvit fit --config mine.yaml\n")
    assert "\n# Expected: " in (tmp_path / "mine.yaml").read_text(encoding="utf-8")
    fit = ("fit", "--print_config", "--config")
    copied, own = (command_line(*fit, config, cwd=tmp_path) for config in ("mine.yaml", name))
    assert copied.code == 0, copied.err
    assert copied.out == own.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["configs", "quikstart"], "configuration 'quikstart' is neither a name nor an existing file"),
        (["configs", "--output", "x.yaml"], "--output is for one configuration"),
        (["configs", "quickstart", "-o", "there.yaml"], "'there.yaml' exists"),
        (["configs", "quickstart", "-o", "no/x.yaml"], "cannot write 'x.yaml': the folder 'no' does not exist"),
    ],
)
def test_mistakes_are_user_errors(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").write_text("mine", encoding="utf-8")
    with pytest.raises(linvit.UserError) as error:
        main(arguments)
    assert str(error.value).startswith(message)
    assert [(path.name, path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()] == [("there.yaml", "mine")]
