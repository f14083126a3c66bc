"""Ranks and what they cost: FLatten's Figure 5 again, a rank at 3,136 tokens, and what the callbacks take of a step.

    python benchmarks/attention_rank.py figure    # DeiT with N = 196, d = 64, untrained and trained on digits
    python benchmarks/attention_rank.py time      # a rank at N = 3,136, d = 64, from factors and from the dense matrix
    python benchmarks/attention_rank.py overhead  # AttentionRank and AttentionMaps at their default cadence

One thread; the times are medians of CPU seconds, so that they hold on a busy machine, too.
"""

import logging
import statistics
import sys
import tempfile
import time
import warnings

import torch
from lightning.pytorch import Trainer
from torch.nn import functional as F

import linvit
from linvit.analysis import attention_rank, attention_statistics
from linvit.analysis.attention_statistics import layer_statistics
from linvit.analysis.recorder import observe
from linvit.callbacks import AttentionMaps, AttentionRank
from linvit.data import ClassificationData
from linvit.tasks import ClassificationTask

DEIT = {"name": "deit_nano", "depth": 2, "embed_dim": 192, "num_heads": 3, "patch_size": 4}
PAPER = {"softmax": 196, "linear": 54, "linear + convolution": 196}
SPECS = {
    "softmax": "softmax",
    "linear": {"name": "linear", "feature_map": "relu"},
    "linear + convolution": {"name": "focused", "focus": False},
    "focused + convolution": "focused",
}
STEPS, BATCH, SIDE = 120, 16, 56


def figure() -> None:
    """Prints the ranks of one image's matrices, mean over heads, of both blocks, and the accuracy on 180 images."""
    data = ClassificationData("digits", batch_size=BATCH, num_workers=0, img_size=SIDE)
    data.setup("fit")
    held_out = _images(data.val_dataloader(), data, 11)
    for name, spec in SPECS.items():
        torch.manual_seed(0)
        model = linvit.create_backbone(DEIT, attention=spec, num_classes=10, img_size=SIDE)
        print(f"{name:24} paper {PAPER.get(name, '-')}", flush=True)
        _ranks("untrained", model, held_out)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        batches = _batches(data)
        for _ in range(STEPS):
            batch = next(batches)
            loss = F.cross_entropy(model.train()(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        _ranks(f"{STEPS} steps", model, held_out)


def _ranks(when: str, model: torch.nn.Module, held_out: dict[str, torch.Tensor]) -> None:
    calls = observe(model, held_out["image"][:1])
    with torch.no_grad():
        score = (model.eval()(held_out["image"]).argmax(1) == held_out["label"]).double().mean().item()
    for layer, call in calls.items():
        found = {
            part or "whole": (numbers["rank"].mean().item(), numbers["effective_rank"].mean().item())
            for part, numbers in layer_statistics([call], channel=0).items()
        }
        shown = ", ".join(f"{part} {rank:.1f} (effective {effective:.1f})" for part, (rank, effective) in found.items())
        print(f"  {when:10} {layer}: {shown}; accuracy {score:.3f}", flush=True)


def _batches(data: ClassificationData):
    while True:
        for batch in data.train_dataloader():
            data.finish(batch)
            yield batch


def _images(loader, data: ClassificationData, count: int) -> dict[str, torch.Tensor]:
    found = []
    for batch, _ in zip(loader, range(count), strict=False):
        data.finish(batch)
        found.append(batch)
    return {name: torch.cat([batch[name] for batch in found]) for name in ("image", "label")}


def rank_time() -> None:
    """Prints the time of a rank of one head, and of all statistics."""
    grid = linvit.Grid((56, 56))
    q, k = torch.randn(2, 1, 1, 3136, 64)
    for name in ("linear", "efficient", "taylor", "hydra", "performer", "nystrom"):
        spec = {"name": name, "conv_kernel": 0} if name == "nystrom" else name
        module = linvit.registry.attentions.create(spec, dim=64, num_heads=1, grid=grid)
        both = [_median(lambda: f(module, q, k, grid), 7) for f in (attention_rank, attention_statistics)]  # noqa: B023
        print(f"  {name:12} factors: rank {1e3 * both[0]:8.1f} ms, all statistics {1e3 * both[1]:8.1f} ms", flush=True)
    module = linvit.registry.attentions.create("softmax", dim=64, num_heads=1, grid=grid)
    print(f"  softmax      dense:   rank {1e3 * _median(lambda: attention_rank(module, q, k, grid), 1):8.1f} ms")


def overhead() -> None:
    """Prints the time of a measurement of DeiT-T at 224, of a step, and the share; then that of small steps."""
    images, labels = torch.randn(16, 3, 224, 224), torch.zeros(16, dtype=torch.long)
    for attention in ("softmax", "linear", "focused"):
        model = linvit.create_backbone("deit_tiny", attention=attention)

        def step() -> None:
            F.cross_entropy(model(images), labels).backward()  # noqa: B023

        calls = observe(model, images[:1])

        def rank() -> None:  # of one of the 12 layers, which are alike
            layer_statistics([calls["blocks.0.attn"]], channel=0)  # noqa: B023

        took = _median(step, 1)
        measured = 12 * _median(rank, 3) + _median(lambda: observe(model, images[:1]), 3)  # noqa: B023
        print(
            f"  deit_tiny {attention:8} step of 16 images {took:.2f} s, ranks {measured:.2f} s: "
            f"{measured / (100 * took):.2%} of 100 steps",
            flush=True,
        )
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for callback in (AttentionRank(), AttentionMaps()):
        task = ClassificationTask(
            backbone="deit_nano", attention="focused", num_classes=10, img_size=32, warmup_epochs=0
        )
        data = ClassificationData("digits", batch_size=32, num_workers=0, img_size=32)
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                accelerator="cpu",
                max_steps=STEPS,
                callbacks=[callback],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
                limit_val_batches=0,
            )
            started = time.monotonic()
            trainer.fit(task, data)
        whole = time.monotonic() - started
        print(
            f"  quickstart's model, {STEPS} steps: {type(callback).__name__} {callback.seconds:.2f} s of {whole:.1f} s",
            flush=True,
        )


def _median(function, rounds: int) -> float:
    taken = []
    for _ in range(rounds + (rounds > 1)):
        started = time.process_time()
        function()
        taken.append(time.process_time() - started)
    return statistics.median(taken[rounds > 1 :])


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"figure": figure, "time": rank_time, "overhead": overhead}[sys.argv[1]]()
