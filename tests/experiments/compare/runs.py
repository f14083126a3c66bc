"""Runs as `linvit fit` leaves them, written by hand."""

import yaml

from linvit.runs import result
from linvit.runs.folder import RunFolder

MODEL = {"backbone": "deit_nano", "attention": "softmax", "predict_with": "raw"}


def write_run(folder, seed=0, scores=(0.5, 0.75), epochs=2, task="linvit.tasks.ClassificationTask", **model):
    """A run that has trained for as many epochs as there are scores; finished, with a record, if these are all."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "seed_everything": seed,
        "trainer": {"max_epochs": epochs, "max_steps": -1, "default_root_dir": str(folder)},
        "model": {"class_path": task, "init_args": {**MODEL, **model}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "hparams.yaml").write_text("betas: !!python/tuple [0.9, 0.999]\nnum_classes: 10\nimg_size: 32\n")
    rows = [f"{9 + 10 * i},{i},{score},," for i, score in enumerate(scores)]
    ranks = [f"{10 * i},,,{32 - i},{64 - i}" for i in range(len(scores))]
    lines = ["step,epoch,val/score,rank/blocks.0.attn,rank/blocks.1.attn", *rows, *ranks]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    if len(scores) == epochs:
        result.write(folder / "result.json", result.derive(RunFolder(folder)))
    return folder
