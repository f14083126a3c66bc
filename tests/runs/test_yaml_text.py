"""Files that are not text, and ordinary YAML."""

import pytest

from linvit import UserError
from linvit.cli.options import with_bases
from linvit.runs import yaml_text


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
    value = yaml_text.load(text)
    assert value["uses"] == [{"lr": 1e-6}] * 2
    assert len(value) == 5002
