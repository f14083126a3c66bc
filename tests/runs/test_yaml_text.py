"""YAML that would crash, fill the memory or never end."""

import pytest

from linvit import UserError
from linvit.cli.options import with_bases
from linvit.runs import yaml_text

LEVELS = "\n".join(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 30))
BOMBS = {
    "brackets": ("a: " + "[" * 100_000 + "]" * 100_000, "more than 100 deep"),
    "dashes": ("- " * 100_000, "more than 100 deep"),
    "in quotes": (f"model: '{'[' * 100_000}'", "more than 100 deep"),  # jsonargparse reads such text as YAML
    "aliases": (f"a0: &a0 [1]\n{LEVELS}", "more than 100,000 values"),
    "merges": ("a0: &a0 {b: 1}\n" + LEVELS.replace("[", "{<<: [").replace("]", "]}"), "more than 100,000 values"),
    "a circle": ("a: &a [*a]", "repeats '&a' within itself"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_is_built(tmp_path, name):
    text, said = BOMBS[name]
    path = tmp_path / "bomb.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        with_bases(["fit", "--config", str(path)])
    with pytest.raises(UserError, match=said):
        with_bases(["fit", f"--model.backbone={text}"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00" * 9, "it is not UTF-8"),
        (b"#" * 11 * 2**20, "11,534,336 bytes are more than"),
        (b"seed_everything: " + b"9" * 5000, "Exceeds the limit"),
    ],
    ids=["binary", "large", "digits"],
)
def test_what_is_no_text_is_no_configuration(tmp_path, content, said):
    path = tmp_path / "binary.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"binary.yaml' is not a configuration: {said}"):
        with_bases(["fit", "--config", str(path)])


def test_ordinary_yaml_is_read():
    text = "anchors: &a {lr: 1e-6}\nuses: [*a, *a]\n" + "".join(f"key{i}: value\n" for i in range(5000))
    value = yaml_text.load(text, "the text")
    assert value["uses"] == [{"lr": 1e-6}] * 2
    assert len(value) == 5002
