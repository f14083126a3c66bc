"""Memory and time of evaluating one large image with 150 classes, as a run's validation does it.

Usage: python benchmarks/segmentation_memory.py [--networks small upernet] [--ways whole slide] [--size 3000 4000]

Logits of all classes at full size would be 7.2 GB for 4,000 x 3,000 pixels. Memory is the most that torch allocates at
one time beyond the network, the image and its labels; time is that of the processor, with the profiler that counts
memory. "slide" has windows of 512 pixels at steps of 341.
"""

import argparse
import time
from functools import partial

import torch

from linvit.experiments.measure import peak_memory
from linvit.tasks import SegmentationTask

CLASSES = 150
NETWORKS = {
    "small": {"backbone": "pvt_v2_b0", "head": "semantic_fpn"},
    "upernet": {"backbone": "swin_tiny", "head": "upernet"},
}
WAYS = {"whole": {}, "slide": {"window": 512, "stride": 341}}


def measure(network: str, way: str, size: list[int]) -> None:
    """Prints a row of the table."""
    torch.manual_seed(0)
    task = SegmentationTask(**NETWORKS[network], **WAYS[way], num_classes=CLASSES, img_size=512).eval()
    metrics = task.configure_metrics()
    batch = {
        "image": [torch.randn(3, *size)],
        "mask": [torch.randint(CLASSES, size, dtype=torch.uint8)],
    }
    own = sum(parameter.nbytes for parameter in task.network.parameters())
    begin = time.process_time()
    with torch.inference_mode():
        most = peak_memory(partial(task.score_batch, task.network, batch, metrics))
    seconds = time.process_time() - begin
    logits = CLASSES * size[0] * size[1] * 4
    names = " + ".join(NETWORKS[network].values())
    print(
        f"| {names} | {way} | {own / 1e6:,.0f} | {most / 1e6:,.0f} | {logits / 1e6:,.0f} | {seconds:.0f} |", flush=True
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--size", nargs=2, type=int, default=[3000, 4000], help="height and width")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | way | network, MB | above it, MB | all logits, MB | processor, s |\n|---|---|---|---|---|---|")
    for network in given.networks:
        for way in given.ways:
            measure(network, way, given.size)
