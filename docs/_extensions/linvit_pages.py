"""Pages made of what the package knows of itself: registries, docstrings, tables, parsers and configurations.

They are written before Sphinx reads the folder, and git ignores them, so nothing in them is typed twice.
"""

import functools
import importlib
import io
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from lightning.pytorch import Trainer
from linvit_checks import problems, unanswered
from linvit_math import with_formulas

import linvit
from linvit import Grid
from linvit.analysis import Recorder, attention_cost, rank
from linvit.callbacks import NonFiniteGuard, SaveCheckpoints
from linvit.cli import OWN, main
from linvit.cli.list import expected_of
from linvit.cli.training.help import TRAINER
from linvit.data import ClassificationData
from linvit.registry import Registry, attentions, backbones, heads
from linvit.registry.model_info import dense_info, model_info
from linvit.registry.signatures import parameters_of
from linvit.runs import configs
from linvit.runs.parser import options_of

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
PICTURES = DOCS / "_static" / "attentions"
COSTED = (14, 28, 56)  # sides of the grids for which operations are counted
SIZE, DEIT = {"dim": 192, "num_heads": 3}, Grid((14, 14))  # of DeiT-T
OF_WHAT = "Of the mechanism alone: 192 channels, 3 heads, one image, forward. MFLOP are of all operations."
PUBLIC = (
    *("", "analysis", "attention.kernels", "backbones", "callbacks", "data", "image_size", "layers", "tasks"),
    "testing",
)
SORTED = {f"reference/{page}" for page in ("attentions", "backbones", "heads", "recipes", "keys")}
MEASURED = ("gallery/README.md", "results/linearize.md", "results/*.md", "guides/export.md")
"""Pages with tables of our results, in the order in which a mechanism's page shows its rows of them."""
OF_THE_PROGRAM = ("The conformance kit", "Growth with N", "Attention in training: time and memory")
SECTIONS = {
    "Tutorials": r"tutorials/",
    "Reference": r"reference/(?!attentions/)",
    "Optional": r"reference/attentions/|results/|gallery/|contributing$|architecture$",
    "Docs": "",
}
"""Of llms.txt: a page is in the first whose pattern it begins with."""


def setup(app: "Sphinx") -> dict[str, Any]:
    """Has the pages written, and the large tables sorted by readers."""
    app.connect("builder-inited", prepare)
    app.connect("html-page-context", complete)
    app.connect("build-finished", write_indices)
    app.connect("build-finished", check_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def prepare(app: "Sphinx") -> None:
    """Writes the pages; pictures of tutorials go to a folder that is not published, by default one of the versions'."""
    write_pages()
    app.env.mystnb_config = app.env.mystnb_config.copy(output_folder=str(DOCS / "_build" / "outputs"))


def complete(app: "Sphinx", page: str, template: str, context: dict[str, Any], *_: object) -> None:
    """Makes large tables sortable; the page of wrong addresses finds its style from any of them."""
    if page in SORTED:
        app.add_js_file("tables.js", loading_method="defer")
    if page == "404" and app.config.html_baseurl:
        context["metatags"] += f'<base href="{app.config.html_baseurl}">'


def check_pages(app: "Sphinx", error: Exception | None) -> None:
    """Warns of what is wrong with the pages that were written, which `make docs` takes for an error."""
    if error is None and app.builder.name == "html":
        for line in [*problems(Path(app.outdir)), *unanswered(Path(app.outdir))]:
            logging.getLogger(f"sphinx.{__name__}").warning(line)


def write_pages() -> None:
    """Writes all pages, those of mechanisms with a picture each; what has not changed is not read again by Sphinx."""
    names = own(attentions)
    pages = {f"attentions/{name}": attention_page(name) for name in names}
    pages |= {"attentions": attentions_page(names), "backbones": backbones_page(), "heads": heads_page()}
    pages |= {"recipes": recipes_page(), "command_line": command_line_page(), "python": python_page()}
    pages |= {"keys": keys_page()}
    for page, text in pages.items():
        path = DOCS / "reference" / f"{page}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def own(registry: Registry) -> list[str]:
    """Names in a registry that are linvit's own."""
    return [name for name, entries in registry.entries().items() if entries[0].owner == "linvit"]


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str] = ()) -> str:
    """A table of Markdown. The first column and those of `words` are left-aligned, and so sorted as words."""
    aligned = [":--" if title in (titles[0], *words) else "--:" for title in titles]
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, aligned, *escaped)) + "\n"


def autoclass(*classes: type) -> str:
    """What autodoc says of classes: their docstrings with all options."""
    lines = "\n".join(f".. autoclass:: {one.__module__}.{one.__qualname__}\n" for one in dict.fromkeys(classes))
    return f"```{{eval-rst}}\n{lines}```\n"


@functools.cache
def built(name: str) -> linvit.Attention:
    """A mechanism as DeiT-T has it."""
    return linvit.create_attention(name, grid=DEIT, **SIZE)


def rank_and_state(name: str) -> tuple[str, str]:
    """The bound of a mechanism's rank, if it has a matrix over tokens, and the size of its state, in DeiT-T."""
    import torch

    layer = linvit.AttentionLayer(grid=DEIT, attention=name, **SIZE)
    with Recorder(layer) as recorder:
        layer(torch.randn(1, DEIT.num_keys, SIZE["dim"]), DEIT)
    (call,) = recorder.calls.values()
    over_channels = call.mechanism.channel_matrix(call.q, call.k, DEIT) is not None
    none = over_channels or call.mechanism.facts.no_matrix
    return "" if none else f"{call.mechanism.rank_bound(DEIT)}", f"{call.state() // 4:,}"


def described(name: str) -> tuple[str, str]:
    """The first line of the docstring of a mechanism's module, and the rest."""
    first, _, rest = (importlib.import_module(type(built(name)).__module__).__doc__ or "").partition("\n")
    return first.rstrip("."), rest.strip()


def besides(name: str) -> str:
    """What a mechanism has besides sums over tokens, by its declarations."""
    one = built(name)
    there = {
        "a convolution": "kernel" in one.matrix_parts(),
        "positions": one.facts.rotary,
        "a gate": one.host.gate != "none",
        "a norm of the output": one.host.norm != "none",
        "a stem": one.host.stem != "none",
        "the layer's input": one.host.input,
    }
    return ", ".join(what for what, has in there.items() if has)


def attentions_page(names: list[str]) -> str:
    """All mechanisms in one table."""
    titles = ["attention", "formula", "grows as", "rank, at most", "state, at most", "MMAC", "besides", "paper"]
    rows = []
    for name in names:
        formula = re.search(r"`[^`]*`.*", described(name)[0])
        paper = attentions.describe(name).paper
        link = f"[`{name}`](attentions/{name}.md)"
        macs = f"{attention_cost(name, DEIT, **SIZE).matmul / 1e6:.1f}"
        front = [link, formula[0] if formula else "", built(name).facts.complexity or "", *rank_and_state(name), macs]
        rows.append([*front, besides(name), paper])
    tree = "\n".join(f"attentions/{name}" for name in names)
    return f"""# Attentions

All {len(names)} mechanisms in one notation: q, k, v are the queries, keys and values of one head, N and M their
numbers, d the channels of a head, C those of all. Each name leads to its page.
[Linear attention on one page](../explanation/linear_attention.md) says what the families have in common.

Rank, state (the numbers that all keys and values come down to) and multiply-accumulates (millions) are those of a layer
of DeiT-T: 196 tokens, 192 channels, 3 heads.

{table(titles, rows, [title for title in titles if title not in ("rank, at most", "state, at most", "MMAC")])}
```{{toctree}}
:hidden:

{tree}
```
"""


def attention_page(name: str) -> str:
    """Formula, paper, matrix, operations, options, and who has it."""
    first, rest = described(name)
    counted = [(side * side, attention_cost(name, Grid((side, side)), **SIZE)) for side in COSTED]
    operations = [[f"{n:,}", f"{cost.matmul / 1e6:,.1f}", f"{cost.flops / 1e6:,.1f}"] for n, cost in counted]
    presets = [preset for preset in own(backbones) if name in attentions_of(preset)]
    named = [recipe for recipe in configs.names() if re.search(rf"attention[^#\n]*\b{name}\b", text_of(recipe))]
    recipes = dict.fromkeys([*named, *(recipe for recipe in configs.names() if recipe.split("/")[-1] in presets)])
    parts = {
        "Its matrix": picture(name) or built(name).facts.no_matrix,
        "Its operations": f"{OF_WHAT}\n\n{table(['tokens', 'MACs of products (M)', 'MFLOP'], operations)}",
        "Options": autoclass(type(built(name))),
        "What we measured": "\n\n".join(measured(name)),
        "Backbones that have it": ", ".join(f"`{preset}`" for preset in presets),
        "Recipes": ", ".join(f"`{recipe}`" for recipe in recipes),
    }
    sections = "\n\n".join(f"## {title}\n\n{text}" for title, text in parts.items() if text)
    return f"# {name}\n\n{with_formulas(f'{first}.{chr(10) * 2}{rest}')}\n\n{sections}\n"


def measured(name: str) -> Iterator[str]:
    """The rows of a mechanism, or of its variants such as `focused-pairs8`, in the tables of our results."""
    row = re.compile(rf"\| `?{name}(-[a-z]+[0-9]+)*`? \|")
    for path in dict.fromkeys(path for pattern in MEASURED for path in sorted(DOCS.glob(pattern))):
        text = path.read_text(encoding="utf-8")
        if included := re.search(r"{include} (\S+)", text):
            text = (path.parent / included[1]).read_text(encoding="utf-8")
        first: dict[str, list[str]] = {}  # table under each heading
        for found in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
            heading = re.findall("^#+ (.*)", text[: found.start()], re.MULTILINE)[-1]
            first.setdefault(heading, found[0].splitlines())
        for heading, (titles, rule, *rows) in first.items():
            own_rows = [one for one in rows if row.match(one)]
            if own_rows and heading not in OF_THE_PROGRAM:
                link = f"[{heading}](../../{path.relative_to(DOCS).as_posix()}):\n"
                yield "\n".join([link, titles, rule, *own_rows])


def picture(name: str) -> str:
    """Draws the matrix that a mechanism has in an untrained network for a digit; nothing if it has none."""
    import matplotlib as mpl
    import torch

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    torch.manual_seed(0)
    model = linvit.create_backbone("deit_nano", attention=name, class_token=False, global_pool="avg")
    with Recorder(model) as recorder:
        model(digit()[None])
    call = recorder.calls["blocks.0.attn"]
    if built(name).facts.no_matrix:
        return ""
    over_channels = call.mechanism.channel_matrix(call.q, call.k, call.grid)
    matrix = (call.matrix() if over_channels is None else over_channels[0])[0].detach()  # of the first head
    of_all = "matrix" if matrix.ndim == 2 else "mean over the channels of the matrices"
    highest = rank(matrix).max()
    matrix = matrix.mean(0) if matrix.ndim == 3 else matrix
    shown = {"image, 8 x 8 tokens": digit().mean(0), f"matrix, {len(matrix)} x {len(matrix)}": matrix}
    if over_channels is None:
        shown["row of the token +"] = matrix[36].reshape(8, 8)
    figure, axes = plt.subplots(1, len(shown), figsize=(2.8 * len(shown), 2.9), layout="constrained")
    for axis, (title, values) in zip(axes, shown.items(), strict=True):
        low, most = values.min(), values.abs().max()
        colours = "gray" if axis is axes[0] else "viridis" if low >= 0 else "RdBu_r"
        axis.imshow(values, cmap=colours, vmin=low if low >= 0 else -most, vmax=most)
        axis.set_title(title, fontsize=9)
        axis.set_axis_off()
    if over_channels is None:
        axes[2].plot(4, 4, "k+")
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / f"{name}.png", dpi=110, bbox_inches="tight")
    plt.close(figure)
    where = f"in the first layer of an untrained `deit_nano` for a digit, rank {highest:.0f} of {len(matrix)}"
    colours = "Bright is much" if matrix.min() >= 0 else "Red is positive, blue negative"
    said = f"The {of_all} of `{name}`{' over channels' * (over_channels is not None)} {where}. {colours}."
    return f"![{said.replace('`', '')}](../../_static/attentions/{name}.png)\n\n*{said}*"


@functools.cache
def digit() -> Any:
    """One of the embedded digits, (3, 32, 32), from 0 to 1."""
    data = ClassificationData(source="digits", img_size=32, num_workers=0, crop_pct=1.0)
    data.setup("validate")
    return data.val_dataloader().dataset[0]["image"].float() / 255


def attentions_of(preset: str) -> list[str]:
    """The attentions that a backbone has by default, each once."""
    specs = [parameters_of(backbones.get(preset)).get("attention")]
    found = []
    while specs:
        spec = specs.pop(0)
        if isinstance(spec, (list, tuple)):
            specs = [*spec, *specs]
        elif spec:
            found.append(spec if isinstance(spec, str) else spec["name"])
    return list(dict.fromkeys(found))


@functools.cache
def text_of(recipe: str) -> str:
    """The text of one of linvit's configurations."""
    return configs.text(configs.config_file(recipe))


def constructor(preset: Any) -> Any:
    """The class or function behind a preset."""
    return constructor(preset.func) if isinstance(preset, functools.partial) else preset


def backbones_page() -> str:
    """What is published of the backbones, and their options."""
    rows = []
    for name, facts in model_info().items():
        top1 = "" if facts.top1 is None else f"{facts.top1:.1f}"
        counted = f"{facts.parameters / 1e6:.2f}", f"{facts.macs / 1e9:.2f}", f"{facts.img_size}", top1
        rows.append([f"`{name}`", *counted, ", ".join(attentions_of(name)), facts.top1_source])
    titles = ["backbone", "parameters (M)", "MACs (G)", "image", "top-1 (%)", "attention", "source of the top-1"]
    return f"""# Backbones

Parameters with 1000 classes and multiply-accumulates are counted by linvit; the top-1 on ImageNet-1K is published by
the authors, and not ours. Every attention runs in every one of them, on images of any size.

{table(titles, rows, titles[-2:])}
## Families and their options

{autoclass(*(constructor(backbones.get(name)) for name in own(backbones)))}"""


def heads_page() -> str:
    """The heads, their options, and what is published of networks with them."""
    targets = {name: heads.entries()[name][0].target for name in own(heads)}
    said = {name: heads.describe(name) for name in own(heads)}
    rows = [[f"`{name}`", one.summary, one.paper] for name, one in said.items()]
    published = []
    for (backbone, head, schedule), info in dense_info().items():
        scores = (
            f"{100 * info.scores[key]:.1f}" if key in info.scores else "" for key in ("mIoU", "box_AP", "mask_AP")
        )
        if info.scores:
            published.append([f"`{backbone}`", f"`{head}`", schedule, *scores, info.source])
    titles = ["backbone", "head", "schedule", "mIoU", "box AP", "mask AP", "source"]
    return f"""# Heads

{table(["head", "what it is", "paper"], rows, ("what it is", "paper"))}
## Published scores

By the authors, not ours: mIoU on ADE20K (one scale, crops of 512 x 512), average precision on COCO val2017.

{table(titles, published, ("head", "schedule", "source"))}
## Options

{autoclass(*(heads.get(name) for name in targets))}"""


def recipes_page() -> str:
    """All configurations that come with linvit."""
    said = {name: configs.heading(text_of(name)) for name in configs.names()}
    rows = [[f"`{name}`", expected_of(name, has), has["Paper"]] for name, has in said.items() if "Paper" in has]
    titles = ["recipe", "expected", "paper"]
    return f"""# Recipes

`linvit fit --config NAME` trains one; those of ablations and diagnostics go to `linvit compare NAME`.
`linvit list configs NAME` prints one with all that its bases say; with `--output mine.yaml` it copies the file for you
to change.

{table(titles, rows, titles)}"""


def command_line_page() -> str:
    """What `--help` says."""
    verbs = [verb for verb in re.findall(r"^  ([a-z-]+)", said("--help"), re.MULTILINE) if verb in OWN]
    parts = [f"## linvit {verb}\n\n```text\n{said(verb, '--help')}\n```\n" for verb in verbs]
    return f"# The command line\n\n```text\n{said('--help')}\n```\n\n" + "\n".join(parts)


def keys_page() -> str:
    """The keys of configurations, with types and defaults; of Lightning's Trainer those that one needs."""
    trainer = options_of(Trainer)
    found = [("trainer", Trainer, {name: trainer[name]._replace(help=text) for name, text in TRAINER.items()})]
    owners = [("checkpoint", SaveCheckpoints), ("non_finite", NonFiniteGuard)]
    for key, module in (("data", linvit.data), ("model", linvit.tasks)):
        names = (name for name in module.__all__ if name not in ("Scenes", "Task", "Teacher"))
        owners += [(key, getattr(module, name)) for name in names]
    found += [(key, owner, options_of(owner)) for key, owner in owners]
    parts = []
    for key, owner, options in found:
        cells = [
            (name, kind(one.type), json.dumps(one.default, default=str), one.help) for name, one in options.items()
        ]
        rows = [[*(f"`{cell}`" for cell in front), " ".join(what.split())] for *front, what in cells]
        titles = ("key", "type", "default", "what")
        parts.append(f"## {key}: {owner.__name__}\n\n{table(titles, rows, titles)}")
    return f"""# Keys of configurations

`trainer.max_epochs`, or `--trainer.max_epochs=20` on the command line, is the key `max_epochs` of the first table;
`linvit fit --help=all` has the rest of Lightning's Trainer. `data` and `model` are a class (`class_path`) and its keys
(`init_args`): `init_args: {{lr: 1.0e-3}}` below `model:` in a file, and `--model.lr=1e-3` on the command line.
[Configuration](configuration.md) says how files are put together.

{chr(10).join(parts)}"""


def kind(one: Any) -> str:
    """A type as one would write it."""
    inside = get_args(one)
    if get_origin(one) in (Union, UnionType, Literal):
        return " | ".join(dict.fromkeys(map(kind, inside)))
    name = "null" if one is NoneType else getattr(get_origin(one) or one, "__name__", str(one))
    return f"{name}[{', '.join(map(kind, inside))}]" if inside else name


def said(*argv: str) -> str:
    """What a command prints."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out), suppress(SystemExit):
        main([*argv])
    return out.getvalue().rstrip()


def python_page() -> str:
    """All public names, by module."""
    parts = []
    for module in PUBLIC:
        path = f"linvit.{module}".rstrip(".")
        found = importlib.import_module(path)
        names = "\n".join(documented(path, name, getattr(found, name)) for name in found.__all__)
        parts.append(f"## {path}\n\n{(found.__doc__ or '').strip()}\n\n```{{eval-rst}}\n{names}\n```\n")
    return "# Python\n\nEvery public name with its types. All else may change at any time.\n\n" + "\n".join(parts)


def documented(path: str, name: str, value: Any) -> str:
    """The directive of autodoc for a public name."""
    kind = "class" if isinstance(value, type) else "function" if callable(value) else "data"
    return f".. auto{kind}:: {path}.{name}\n" + ("   :members:\n" if kind == "class" else "")


def write_indices(app: "Sphinx", error: Exception | None) -> None:
    """Writes llms.txt, and a sitemap if the site has an address."""
    if error is not None or app.builder.name != "html":
        return
    out, url = Path(app.outdir), app.config.html_baseurl
    pages = sorted(app.env.found_docs - {"404"})
    about = (linvit.__doc__ or "").partition("\n")[0]
    sections: dict[str, list[str]] = {title: [] for title in ("Docs", *SECTIONS)}
    for page in pages:
        title = next(title for title, pattern in SECTIONS.items() if re.match(pattern, page))
        sections[title].append(f"- [{app.env.titles[page].astext()}]({url}{page}.html)")
    lists = (f"## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items() if lines)
    (out / "llms.txt").write_text("\n".join([f"# linvit\n\n> {about}\n", *lists]), encoding="utf-8")
    if url:
        entries = "".join(f"<url><loc>{url}{page}.html</loc></url>" for page in pages)
        head = '<?xml version="1.0" encoding="UTF-8"?><urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">'
        (out / "sitemap.xml").write_text(f"{head}{entries}</urlset>\n", encoding="utf-8")
