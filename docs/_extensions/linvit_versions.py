"""The versions of the site, each in a folder: a page that leads to the newest, a list of all, a note on older pages."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# Pages load it from above the folders of versions, so that an old one knows of a new one without being built again.
SCRIPT = """{
  const { version, up } = document.currentScript.dataset;
  const versions = VERSIONS;
  const add = (where, text, href, link, name) => {
    const line = document.createElement("p");
    const a = Object.assign(document.createElement("a"), { href, textContent: link });
    line.className = name;
    line.append(text, a);
    where.prepend(line);
  };
  if (version !== versions[0])
    add(document.querySelector("article"), `This is version ${version}. `, `${up}index.html`,
      `The newest is ${versions[0]}.`, "admonition warning");
  if (versions.length > 1)
    add(document.querySelector("footer"), `Version ${version}. `, `${up}versions.html`, "All versions", "versions");
}
"""
PAGE = '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<title>linvit</title>\n{}\n</html>\n'
STYLE = (
    '<meta name="viewport" content="width=device-width">\n'
    "<style>:root { color-scheme: light dark; font: 1rem/1.6 sans-serif; margin: 2rem }</style>"
)


def setup(app: "Sphinx") -> dict[str, Any]:
    """Every page loads the script; what lies above the versions is written when a build has ended."""
    app.connect("html-page-context", load_script)
    app.connect("build-finished", write_versions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def load_script(app: "Sphinx", page: str, template: str, context: dict[str, Any], *_: object) -> None:
    """Has a page load the script, and tell it the page's version and the way up."""
    up = "../" * (page.count("/") + 1)
    data = f'data-version="{app.config.version}" data-up="{up}"'
    context["metatags"] = context.get("metatags", "") + f'<script defer src="{up}versions.js" {data}></script>'


def write_versions(app: "Sphinx", error: Exception | None) -> None:
    """Writes the page that leads to the newest version, the list of all, and the script of their pages."""
    if error is not None or app.builder.name != "html":
        return
    above = Path(app.outdir).parent
    versions = newest_first(path.parent.name for path in above.glob("*/index.html"))
    home = f"{versions[0]}/index.html"
    lead = f'<meta http-equiv="refresh" content="0; url={home}">\n<a href="{home}">linvit {versions[0]}</a>'
    lines = "\n".join(f'<li><a href="{one}/index.html">{one}</a></li>' for one in versions)
    written = {
        "index.html": PAGE.format(lead),
        "versions.html": PAGE.format(f"{STYLE}\n<h1>linvit: all versions</h1>\n<ul>\n{lines}\n</ul>"),
        "versions.js": SCRIPT.replace("VERSIONS", json.dumps(versions)),
    }
    for name, text in written.items():
        (above / name).write_text(text, encoding="utf-8")


def newest_first(names: Iterable[str]) -> list[str]:
    """Names that are versions; final ones come before pre-releases, to which nobody is led."""
    found = []
    for name in names:
        try:
            found.append(Version(name))
        except InvalidVersion:
            continue
    return [str(one) for one in sorted(found, key=lambda one: (not one.is_prerelease, one), reverse=True)]
