"""What a training run prints when it has ended: its best scores, and the commands to go on with."""

from pathlib import Path
from shlex import quote

from lightning.pytorch.callbacks import ModelCheckpoint

from linvit.runs.paths import shown


def run_summary(best: ModelCheckpoint, best_ema: ModelCheckpoint | None, run: Path, length: str) -> str:
    """Best score, its checkpoint, and the commands to go on with.

    Args:
        best: The callback that kept the best checkpoint.
        best_ema: The callback that kept the best moving average, if there is one.
        run: Folder of the run.
        length: The option that ended it: max_epochs or max_steps.
    """
    checkpoint = Path(best.best_model_path)
    config = quote(str(shown(run_config(run))))
    lines = _best(best)
    if best_ema is not None and best_ema.best_model_path:
        lines += _best(best_ema)
    lines += [
        f"test it         linvit test --config {config} --ckpt_path {quote(str(shown(checkpoint)))}",
        f"go on training  linvit fit --config {config} --resume=auto --trainer.{length}=MORE",
        f"look at it      tensorboard --logdir {quote(str(shown(run.parent)))}",
    ]
    return "\n" + "".join(f"  {line}\n" for line in lines)


def how_to_go_on(run: Path) -> str:
    """What a run prints that something has ended: how to go on with it, be there a checkpoint yet or not."""
    config = run_config(run)
    return f"go on with\n  linvit fit --config {quote(str(shown(config)))} --resume=auto" if config.exists() else ""


def run_config(run: Path) -> Path:
    """The configuration that a run was started with, or went on with last."""
    return max(run.glob("config*.yaml"), key=lambda path: path.stat().st_mtime_ns, default=run / "config.yaml")


def _best(callback: ModelCheckpoint) -> list[str]:
    score = "none" if callback.best_model_score is None else f"{callback.best_model_score:.4f}"
    return [f"best {callback.monitor}  {score}", f"checkpoint      {shown(Path(callback.best_model_path))}"]
