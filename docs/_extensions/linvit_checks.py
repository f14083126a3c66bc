"""What can be wrong with a built page: headings, words for pictures, links, and what it would fetch from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

OF_SPHINX = ("genindex.html", "search.html")  # which it writes as it wants
FETCHED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}


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
