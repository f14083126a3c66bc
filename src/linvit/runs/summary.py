"""What a training run prints when it has ended: its best scores, and the commands to continue with."""

from pathlib import Path
from shlex import quote

from linvit.callbacks.save_checkpoints import SaveCheckpoints
from linvit.runs.folder import run_config, shown


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
    """What a run prints that something has ended: how to go on with it, be there a checkpoint yet or not."""
    config = run_config(run)
    return f"go on with\n  linvit fit --config {quote(str(shown(config)))} --resume=auto" if config.exists() else ""
