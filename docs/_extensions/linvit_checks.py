"""What can be wrong with built pages: headings, words for pictures, links, what they fetch, questions they answer."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.search.en import SearchEnglish

OF_SPHINX = ("genindex.html", "search.html")  # which it writes as it wants
FETCHED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}

QUESTIONS = {
    "resume after crash": "tutorials/resume",
    "resume from checkpoint": "tutorials/resume",
    "use my own masks": "guides/segment",
    "does linear attention help at 1024 px": "questions",
    "log to wandb": "guides/trainer",
    "load DINOv2 weights and make them linear": "guides/linearize",
    "export onnx dynamic axes": "guides/export",
    "freeze backbone": "guides/backbones",
    "early stopping patience": "guides/trainer",
    "out of memory batch size": "questions",
    "mmsegmentation config": "guides/migrate",
    "shell completion tab": "guides/shell",
}
"""What readers type into the search, also in words of other libraries, and a page that must be among the answers."""


class Page(HTMLParser):
    """Reads what is checked of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.language = ""
        self.headings: list[int] = []
        self.targets: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.unnamed: list[str] = []
        self.bare_tables = 0
        self._open: list[bool] = []  # for each element that is open, a div in which a table may scroll
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes an element."""
        given = {name: value or "" for name, value in attrs}
        self.targets |= {given[name] for name in ("id", "name") if name in given}
        if tag == "html":
            self.language = given.get("lang", "")
        elif re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "img" and re.fullmatch(r"|.*_images/.*|.*\.\w{3}", given.get("alt", "")):
            self.unnamed.append(given.get("src", ""))
        elif tag == "div":
            self._open.append("table-wrapper" in given.get("class", ""))
        elif tag == "table" and not any(self._open):
            self.bare_tables += 1
        if tag in FETCHED and given.get("rel") != "canonical":
            self.fetched.append(given.get(FETCHED[tag], ""))

    def handle_endtag(self, tag: str) -> None:
        """Leaves a box."""
        if tag == "div" and self._open:
            self._open.pop()


def problems(folder: Path) -> list[str]:
    """What is wrong with the pages below a folder, each with its page."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    found = []
    for path, page in pages.items():
        wrong: list[str] = []
        if path.name in OF_SPHINX:
            continue
        if not page.language:
            wrong.append("no language")
        if page.headings.count(1) != 1:
            wrong.append(f"{page.headings.count(1)} headings of the first level")
        if any(after > before + 1 for before, after in zip(page.headings, page.headings[1:], strict=False)):
            wrong.append(f"a level of headings is left out: {page.headings}")
        wrong += [f"no words for the picture {one}" for one in page.unnamed]
        wrong += [f"{page.bare_tables} tables that do not scroll"] * bool(page.bare_tables)
        wrong += [f"fetches {one}" for one in page.fetched if re.match("(https?:)?//", one)]
        for link in page.links:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.scheme or parts.netloc:
                continue
            if not target.exists() or (
                parts.fragment and target in pages and parts.fragment not in pages[target].targets
            ):
                wrong.append(f"leads nowhere: {link}")
        found += [f"{path.relative_to(folder.resolve())}: {what}" for what in dict.fromkeys(wrong)]
    return found


def unanswered(folder: Path) -> list[str]:
    """Questions whose page the search of the site does not find, or that is more than two clicks from the home page."""
    text = (folder / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    language, pages = SearchEnglish({}), index["docnames"]

    def having(word: str) -> set[str]:
        places = (index[kind].get(language.stem(word), []) for kind in ("terms", "titleterms"))
        return {pages[place] for own in places for place in (own if isinstance(own, list) else [own])}

    home, found = folder / "index.html", []
    near = {home.resolve()}
    for _ in range(2):
        links = [(path, Page(path.read_text(encoding="utf-8")).links) for path in near if path.suffix == ".html"]
        near |= {(path.parent / unquote(urlsplit(one).path)).resolve() for path, own in links for one in own}
    for question, page in QUESTIONS.items():
        words = [word for word in re.findall(r"\w+", question.lower()) if word not in language.stopwords]
        answers = set.intersection(*(having(word) for word in words if not word.isdecimal()))
        if page not in answers:
            found.append(
                f"the search for '{question}' does not find {page}, but {', '.join(sorted(answers)) or 'nothing'}"
            )
        if (folder / f"{page}.html").resolve() not in near:
            found.append(f"{page}, which answers '{question}', is more than two clicks from the home page")
    return found
