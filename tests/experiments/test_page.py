"""The self-contained page: what it is given is text, it loads nothing, and it is well-formed."""

from html.parser import HTMLParser

import pytest
from PIL import Image

from linvit.experiments.page import Page

HOSTILE = '<script>alert(1)</script>" onerror="x" & \x1b[2J \udc80'
ALONE = {"meta", "img"}


class Reader(HTMLParser):
    """Elements with their attributes, the text, and whether each element is closed in its place."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page, folder):
    page.write(folder / "page.html")
    return Reader((folder / "page.html").read_text(encoding="utf-8"))


def test_whatever_is_given_is_text(tmp_path):
    page = Page(HOSTILE)
    page.heading(HOSTILE)
    page.paragraph(HOSTILE)
    page.code(HOSTILE)
    page.table([HOSTILE], [[HOSTILE]], HOSTILE)
    page.pictures([(Image.new("RGB", (2, 2)), HOSTILE)])
    with page.folded(HOSTILE):
        page.paragraph("within")
    found = read(page, tmp_path)
    assert found.open == []
    assert {tag for tag, _ in found.elements}.isdisjoint({"script", "link", "iframe"})
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    shown = '<script>alert(1)</script>" onerror="x" & \\x1b[2J \\udc80'
    assert sum(shown in text for text in found.text) == 10
    assert [attributes["alt"] for tag, attributes in found.elements if tag == "img"] == [shown]


def test_it_loads_nothing(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    page = Page("x")
    page.pictures([(tmp_path / "a.png", "file"), ("<svg/>", "drawing"), (Image.new("L", (1, 1)), "image")], width=80)
    images = [attributes for tag, attributes in read(page, tmp_path).elements if tag == "img"]
    kinds = [image["src"].partition(";")[0] for image in images]
    assert kinds == ["data:image/png", "data:image/svg+xml", "data:image/png"]
    assert "http" not in (tmp_path / "page.html").read_text(encoding="utf-8").replace("http-equiv", "")


@pytest.mark.parametrize(
    ("cells", "left"),
    [(["1", "-0.5", "98.6 ± 0.1", "nan", None, 3], False), (["1", "a"], True), ([], False)],
    ids=str,
)
def test_columns_of_words_stand_to_the_left(tmp_path, cells, left):
    page = Page("x")
    page.table(["layer", "value"], [["blocks.0", cell] for cell in cells])
    titles = [attributes for tag, attributes in read(page, tmp_path).elements if tag == "th"]
    assert ("class" in titles[1]) == left
