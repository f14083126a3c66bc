"""Checks the ceiling of `linvit advise`: no attention makes a network faster than a copy of v in its place.

All mechanisms in three hosts (a plain ViT, PVT v2, Swin) at two sizes, each in turns with the ceiling of its own
projections. A mechanism beats the ceiling if the median ratio is above 1.03 and its 95 % interval above 1; it is then
measured once more, in three times as many turns, since of 228 intervals of 95 % some err by chance.

    python benchmarks/advise_ceiling.py > ceilings.csv
"""

import argparse
import csv
import sys
import time
from collections.abc import Mapping, Sequence

import timm
import torch
from torch import nn

from linvit.advice.subject import Subject, find_subject, without_cores
from linvit.attention.base import Attention
from linvit.errors import UserError
from linvit.experiments.measure import Estimate, Timing, Turns, processor_share
from linvit.registry import attentions

HOSTS: Mapping[str, tuple[str, dict[str, object], tuple[int, int]]] = {
    "plain ViT": ("vit_tiny_patch16_224", {"depth": 2}, (224, 448)),
    "PVT v2": ("pvt_v2_b0", {"depths": (1, 1, 1, 1)}, (224, 320)),
    "Swin": ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 1, 1)}, (224, 448)),
}
TURNS = 8
BEATEN = 1.03


def main(argv: Sequence[str]) -> int:
    """Prints a CSV row per host, size and mechanism; returns 1 if the ceiling was beaten."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=TURNS)
    turns = parser.parse_args(argv).turns
    torch.set_num_threads(1)
    table = csv.writer(sys.stdout)
    table.writerow(["host", "side", "attention", "projections", "ms", "ceiling / time", "low", "high", "turns"])
    beaten = []
    for host, (name, options, sides) in HOSTS.items():
        for side in sides:
            fixed = {} if host == "PVT v2" else {"img_size": side}
            subject = find_subject(timm.create_model(name, **fixed, **options))
            found = measured(subject, (side, side), attentions.names(), turns)
            again = [mechanism for mechanism, (_, _, ratio) in found.items() if beats(ratio)]
            if again:
                found |= measured(subject, (side, side), again, 3 * turns)
            for mechanism, (project, seconds, ratio) in found.items():
                table.writerow([host, side, mechanism, project, f"{1e3 * seconds:.4g}", *(f"{x:.4g}" for x in ratio)])
                beaten += [f"{mechanism} in {host} at {side}"] * beats(ratio)
            sys.stdout.flush()
    print(f"processor time, one thread; processor share at the end {processor_share():.2f}", file=sys.stderr)
    print("beaten: " + (", ".join(beaten) or "none"), file=sys.stderr)
    return bool(beaten)


def beats(ratio: Estimate) -> bool:
    """True if a mechanism is faster than the ceiling beyond 3 % and beyond the interval."""
    return ratio.median > BEATEN and ratio.low > 1


def measured(
    subject: Subject, size: tuple[int, int], names: Sequence[str], turns: int
) -> dict[str, tuple[str, float, Estimate]]:
    """Projections, seconds, and the ceiling's time over that of each mechanism, which takes turns with all others."""
    network, image = subject.build(size).eval(), torch.randn(1, 3, *size)
    clock, projects = Turns[str](clock=time.process_time), dict[str, str]()

    def add(name: str, one: nn.Module) -> None:
        one.eval()
        clock.add(name, lambda: one(image))

    with torch.inference_mode():
        for name in names:
            try:
                made = subject.with_attention(network, name, size)
                add(name, made)
                project = next(one.host.project for one in made.modules() if isinstance(one, Attention))
            except (UserError, TypeError, ValueError) as error:
                clock.times.pop(name, None)
                print(f"{name} at {size}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
                continue
            projects[name] = project
        for project in set(projects.values()):
            add(f"ceiling of {project}", without_cores(subject, network, size, project))
        for _ in range(turns):
            for _ in clock.round([*clock.times]):
                pass
    times = {name: Timing(tuple(seconds)) for name, seconds in clock.times.items()}
    return {
        name: (project, times[name].median, times[f"ceiling of {project}"].over(times[name]))
        for name, project in projects.items()
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
