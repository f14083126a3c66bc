"""Settings of Sphinx: `make docs` builds the site from this folder into docs/_build/html/VERSION."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path += [str(DOCS / "_extensions")]

_project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
project, version = _project["name"], _project["version"]
release = version
author = copyright = "the linvit authors"
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_copybutton",
    "linvit_math",
    "linvit_pages",
    "linvit_versions",
    "linvit_wheel",
]
exclude_patterns = ["_build"]

# Markdown: headings are targets of links, cells of tutorials run once and again only if they have changed.
myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_substitutions = {}  # linvit_wheel names the wheel
myst_heading_anchors = 3
os.environ["IPYTHONDIR"] = str(DOCS / "_extensions" / "ipython")
TUTORIALS = os.environ.get("TUTORIALS", "all")
EXECUTED = {"changed": "executed when it last changed", "none": "not executed in this build"}
myst_substitutions["executed"] = EXECUTED.get(TUTORIALS, "executed when this site was built")
nb_execution_mode = "off" if TUTORIALS == "none" else "cache"
if TUTORIALS == "changed":  # by the last commit
    said = subprocess.run(["git", "diff", "--name-only", "HEAD~1"], cwd=ROOT, capture_output=True, text=True)
    if said.returncode == 0:  # without that commit, as in an unpacked source distribution, all are run
        changed = {ROOT / line for line in said.stdout.splitlines()}
        nb_execution_excludepatterns = [
            str(page) for page in DOCS.rglob("*.md") if page not in changed and page.stem != "first_minute"
        ]
nb_execution_cache_path = str(DOCS / "_build" / "cells")
nb_execution_timeout = 900  # seconds of a cell; a minute on a machine with nothing else to do
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
nb_render_markdown_format = "myst"  # tables, in outputs too

# Docstrings: single backticks are code, types stand in the signatures.
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_ivar = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Args of the constructors of families", "params_style")]
maximum_signature_line_length = 80
add_module_names = False
python_use_unqualified_type_names = True

os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # tutorials call linvit

html_theme = "furo"
html_baseurl = os.environ.get("URL", "")  # where the site will lie, for its sitemap; links do without
html_title = f"linvit {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_search_summary = False  # which a page that is opened as a file may not fetch
html_show_sourcelink = False
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"
