"""Which card does a recipe need? Peak memory of a training step at the published batch of a device, without a GPU.

    PYTHONPATH=src:. python benchmarks/recipe_memory.py [NETWORK ...]

Forward, backward, AdamW and the moving average run on the CUDA device that is not there (`tests/null_cuda`), with
torch's own allocator, under bfloat16 autocast. Its statistics are printed: what torch asks a device for. All values are
0, so that detectors find nothing and keep less; cuDNN, which asks for no workspace there, may need one; and the
context of CUDA takes some 0.5 GiB. A network that needs more than the 80 GiB of that device is not counted.
"""

import copy
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import linvit
from linvit.tasks.execution import keep_attention_features
from linvit.tasks.segmentation.scores import pixel_cross_entropy
from tests.null_cuda.device import build, missing, run

MODELS = [  # backbone, head, classes, images of a device, size
    *((name, None, 1000, 128, (224, 224)) for name in ("deit_small", "pvt_small", "pvt_v2_b2", "swin_tiny")),
    *((name, None, 1000, 128, (224, 224)) for name in ("cswin_tiny", "soft_small", "mlla_tiny", "ravlt_s")),
    *((name, None, 1000, 128, (224, 224)) for name in ("flatten_deit_tiny", "flatten_pvt_small", "flatten_swin_tiny")),
    ("pvt_small", "semantic_fpn", 150, 4, (512, 512)),
    ("swin_tiny", "upernet", 150, 2, (512, 512)),
    ("flatten_swin_tiny", "upernet", 150, 2, (512, 512)),
    ("pvt_small", "retinanet", 80, 2, (800, 1344)),
    ("swin_tiny", "mask_rcnn", 80, 2, (800, 1344)),
    ("swin_tiny", "cascade_mask_rcnn", 80, 2, (800, 1344)),
]


def peak(name: str, head: str | None, classes: int, batch: int, size: tuple[int, int], recompute: bool) -> float:
    """GiB of the second step."""
    if head is None:
        network: nn.Module = linvit.create_backbone(name, num_classes=classes, img_size=size[0])
    else:
        create = linvit.create_segmentor if size[0] == size[1] else linvit.create_detector
        network = create(name, head, classes, img_size=size)
    network = network.cuda().train()
    if not recompute:
        keep_attention_features(network)
    average = copy.deepcopy(network)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    images = torch.zeros(batch, 3, *size, device="cuda")
    mask = torch.zeros(batch, *size, dtype=torch.long, device="cuda")
    target = {"boxes": torch.zeros(7, 4), "labels": mask[0, 0, :7], "masks": mask[:1].expand(7, -1, -1).byte()}
    target["boxes"] = target["boxes"].cuda()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            if head is None:
                loss = nn.functional.cross_entropy(network(images), mask[:, 0, 0])
            elif size[0] == size[1]:
                logits, others = network(images, auxiliary=True, full_size=False)
                loss = sum(pixel_cross_entropy(one, mask) for one in (logits, *others))
            else:
                loss = sum(network(list(images), [target] * batch).values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del average
    return torch.cuda.max_memory_allocated() / 2**30


def main() -> int:
    """Prints the table."""
    if "CALLS" in os.environ:
        torch.backends.cuda.enable_cudnn_sdp(False)
        print("| network | head | images | size | GiB | recomputing |\n|---|---|---|---|---|---|", flush=True)
        wanted = sys.argv[1:] or [name for name, *_ in MODELS]
        for name, head, classes, batch, size in (row for row in MODELS if row[0] in wanted):
            found = [f"{peak(name, head, classes, batch, size, recompute):.1f}" for recompute in (False, True)]
            shown = f"{size[0]} x {size[1]}"
            print(f"| `{name}` | {head or ''} | {batch} | {shown} | {' | '.join(found)} |", flush=True)
        os._exit(0)
    if (lack := missing()) is not None:
        print(lack, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        done = run(build(Path(folder)), Path(os.devnull), [os.path.relpath(__file__), *sys.argv[1:]])
    print(done.stdout, done.stderr[-2000:] if done.returncode else "")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
