"""What a run prints when it has ended: its scores, and the commands to continue with."""

from collections.abc import Mapping
from pathlib import Path
from shlex import quote

from linvit.callbacks.save_checkpoints import SaveCheckpoints
from linvit.runs.folder import run_config, shown
from linvit.tasks.published import PublishedScores


def run_summary(saves: SaveCheckpoints, predict_with: str, run: Path, length: str) -> str:
    """Best scores, their checkpoints, and the commands to continue with; "" if none is kept.

    Args:
        saves: The callback that has kept them.
        predict_with: The weights that predict, "raw" or "ema"; their best checkpoint is the one to test.
        run: Folder of the run.
        length: The option that ended it: max_epochs or max_steps.
    """
    found = [best for best in saves.best if best.kept]
    if not found:
        return ""
    paths = [str(shown(Path(str(saves.dirpath), str(best.name)))) for best in found]
    config = quote(str(shown(run_config(run))))
    lines = []
    for best, path in zip(found, paths, strict=True):
        lines += [f"best {best.monitor}  {best.kept[str(best.name)]:.4f}", f"checkpoint      {path}"]
    lines += [
        f"test it         linvit test --config {config} --ckpt_path {quote(paths[-(predict_with == 'ema')])}",
        f"go on training  linvit fit --config {config} --resume=auto --trainer.{length}=MORE",
        f"look at it      tensorboard --logdir {quote(str(shown(run.parent)))}",
    ]
    return "\n" + "".join(f"  {line}\n" for line in lines)


def how_to_go_on(run: Path) -> str:
    """What a run prints that something has ended: how to resume it, with or without a checkpoint."""
    config = run_config(run)
    return f"go on with\n  linvit fit --config {quote(str(shown(config)))} --resume=auto" if config.exists() else ""


def score_table(scores: Mapping[str, float], images: int, known: PublishedScores | None) -> str:
    """The scores, those of the moving average after those of the weights, and the published ones beside ours.

    Args:
        scores: By tag, such as test/loss or test/ema_loss, in the order in which the task logs them.
        images: How many images they are over.
        known: The published scores, if there are any to compare with.
    """
    lines = [f"{images} images" + (f"; published: {known.source}" if known else "")]
    lines.append(f"  {'':<18} {'ours':<12} {'published' if known else ''}".rstrip())
    for tag in sorted(scores, key=_place):
        score = known.scores.get(_name(tag)) if known else None
        beside = "" if score is None else f"{score:.4f}"
        lines.append(f"  {tag:<18} {scores[tag]:<12.7g} {beside}".rstrip())
    return "\n".join(lines)


def _name(tag: str) -> str:
    """The name of the metric."""
    return tag.rpartition("/")[2].removeprefix("ema_")


def _place(tag: str) -> tuple[bool, int]:
    """The weights before their average; of each, the score first and the loss last."""
    return "/ema_" in tag, {"score": 0, "loss": 2}.get(_name(tag), 1)
