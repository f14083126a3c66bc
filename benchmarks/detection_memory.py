"""Memory of a long evaluation of detection: `python benchmarks/detection_memory.py [IMAGES]`.

Images of 480 x 640 pixels with 100 detected masks each, as a detector hands them over. Prints the resident memory every
so many images, what the results take of it, and what COCO's evaluation needs at the end, and its time.
"""

import os
import sys
import time

import torch

from linvit.tasks.detection.evaluation import DetectionResults, Objects

SIZE, COUNT, CLASSES = (480, 640), 100, 80


def resident() -> float:
    """Resident memory of this process in MiB."""
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def detections(seed: int) -> dict[str, torch.Tensor]:
    """Discs with ragged edges, as masks of objects are."""
    draw = torch.Generator().manual_seed(seed)
    centre = torch.rand(COUNT, 2, generator=draw) * torch.tensor(SIZE)
    radius = 5 + 75 * torch.rand(COUNT, generator=draw)
    rows, columns = (torch.arange(side, dtype=torch.float32) for side in SIZE)
    distance = (rows[:, None] - centre[:, 0, None, None]) ** 2 + (columns - centre[:, 1, None, None]) ** 2
    waves = 1 + 0.2 * torch.sin(rows / 3)[:, None] * torch.sin(columns / 2)
    masks = distance < (radius[:, None, None] * waves) ** 2
    corners = [centre.flip(1) - radius[:, None], centre.flip(1) + radius[:, None]]
    labels, scores = torch.randint(CLASSES, (COUNT,), generator=draw), torch.rand(COUNT, generator=draw)
    return {"boxes": torch.cat(corners, 1), "labels": labels, "scores": scores.sort(descending=True)[0], "masks": masks}


def main() -> None:
    """Prints all of it."""
    images = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    results = DetectionResults(CLASSES, ["box", "mask"], "box")
    given = [detections(seed) for seed in range(8)]
    started = time.process_time()
    for i in range(images):
        found = Objects.of_detections(given[i % len(given)], SIZE)
        first = [None if part is None else part[:7] for part in found[1:5]]
        true = Objects(SIZE, first[0], first[1], first[2], None, first[1] < 0, 100 + 0 * first[3])
        results.update(i, true, found)
        if i % max(images // 10, 1) == 0 or i == images - 1:
            print(f"{i + 1:>6} images: {resident():7.0f} MiB, {time.process_time() - started:6.1f} CPU s", flush=True)
    started = time.perf_counter()
    figures = results.figures()
    seconds = time.perf_counter() - started
    print(f"COCO's evaluation: {seconds:.1f} s, {resident():.0f} MiB; box AP {figures['box_AP']:.4f}")


if __name__ == "__main__":
    main()
