"""The page "First minute" runs from the built wheel, in an environment of its own, and can be downloaded with it."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "tutorials" / "first_minute.md"
FOLDER = DOCS / "_build" / "first_minute"
CELL = re.compile(r"^```{code-cell} python\n((?::tags: [^\n]*\n|---\n.*?^---\n)?)(.*?)^```\n", re.MULTILINE | re.DOTALL)


def setup(app: "Sphinx") -> dict[str, Any]:
    """Builds the wheel and, if pages are executed, the kernel."""
    app.connect("config-inited", prepare)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def prepare(app: "Sphinx", config: Any) -> None:
    """Writes wheel, notebook and kernel below docs/_build, and has the page name the wheel."""
    wheel = build_wheel()
    config.myst_substitutions["wheel"] = f"{{download}}`{wheel.name} <../_build/first_minute/{wheel.name}>`"
    (FOLDER / "first_minute.ipynb").write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if config.nb_execution_mode != "off":
        install_kernel(wheel)


def build_wheel() -> Path:
    """Builds the wheel from the source distribution, so that it has what an upload would have."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(FOLDER), str(DOCS.parent)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"the wheel cannot be built:\n{done.stdout}")
    (wheel,) = FOLDER.glob("*.whl")
    return wheel


def install_kernel(wheel: Path) -> None:
    """Makes an environment with the wheel, which takes its dependencies from this one, and a kernel of it."""
    environment = FOLDER / "environment"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it may have linvit
    venv.create(environment, symlinks=os.name != "nt")
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    command = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, *command], check=True, env=variables)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    where = subprocess.run(
        [python, "-c", ask], check=True, capture_output=True, text=True, env=variables
    ).stdout.strip()
    Path(where, "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    kernel = FOLDER / "kernels" / "wheel" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "linvit's wheel", "language": "python", "env": {"PYTHONPATH": ""}}
    kernel.write_text(json.dumps(spec), encoding="utf-8")
    os.environ["JUPYTER_PATH"] = os.pathsep.join([str(FOLDER), os.environ.get("JUPYTER_PATH", "")])


def notebook(page: str) -> str:
    """The page from "Install" on as a notebook of the usual kernel, without the cells that only the site runs."""
    text = "# First minute with linvit\n\n" + page[page.index("## Install") :]
    text = re.sub(r"\[([^\]]+)\]\(\S+\.md\)", r"\1", text)  # links lead to pages of the site
    cells, end = [], 0
    for found in CELL.finditer(text):
        if words := text[end : found.start()].strip():
            cells.append(nbformat.v4.new_markdown_cell(words, id=f"cell-{len(cells)}"))
        if "remove-cell" not in found[1]:
            cells.append(nbformat.v4.new_code_cell(found[2].rstrip(), id=f"cell-{len(cells)}"))
        end = found.end()
    cells.append(nbformat.v4.new_markdown_cell(text[end:].strip(), id=f"cell-{len(cells)}"))
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return str(nbformat.writes(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": spec})))
