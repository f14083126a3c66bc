"""`linvit advise`: does another attention make a network faster here, from which image size, and which attention?"""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from linvit.io.terminal import argument_parser, reflow

EPILOG = """examples:
  linvit advise vit_small_patch16_224             its own size, then steps of
                                                  sqrt(2) up to four times it
  linvit advise vit_small_patch16_224 --img_size 224,512,1024
  linvit advise vit_small_patch14_dinov2 --mode train --device cuda
  linvit advise checkpoints/mine/version_3 --data photos --hours 0.5
  linvit advise vit_tiny_patch16_224 --attention focused \\
    --attention '{layout: jetvit, linear: hedgehog}'

The answer is No, Room from a size, Yes from a size, or Undecided. It is No
when the network without attention is less than 15 % faster, or when softmax at
its best or in windows is faster than all mechanisms. Room: the network without
attention is faster, and mechanisms are not (yet) proven to be. With --data
mechanisms and rivals learn for equal times from the network; then a mechanism
wins if no rival is as fast and as good on held-out images. Labels
are used if they are the network's own classes. advise.json and advise.html
have all rows. Ctrl-C prints the results so far.
"""
CTRL_C = 130  # exit code after Ctrl-C


def main(argv: list[str]) -> int:
    """Runs `linvit advise`; prints the verdict and the table, returns 0, or 130 after Ctrl-C."""
    begun = time.monotonic()
    parser = argument_parser("linvit advise", __doc__, EPILOG)
    parser.add_argument(
        "model", metavar="MODEL", help="a name of timm or linvit, a run, a file of linvit.load, or hf:FOLDER"
    )
    parser.add_argument("--img_size", help="sides or HxW, with commas (its own, then steps of sqrt(2))")
    parser.add_argument("--mode", choices=["inference", "train"], default="inference", help="(%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument("--dtype", default="float32", help="of weights and images, such as bfloat16 (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=1, help="images per call (%(default)s)")
    about = "NAME, {name: ..., option: value} or {layout: ...}; more than once; '*': all mechanisms (the six fastest)"
    parser.add_argument("--attention", action="append", metavar="SPEC", help=about.replace("%", "%%"))
    parser.add_argument("--minutes", type=float, default=5.0, help="time limit (%(default)s)")
    parser.add_argument("--smaller", metavar="MODEL", help="smaller model for comparison (timm's next of the family)")
    parser.add_argument("--compile", action="store_true", help="measure softmax by torch.compile too; takes minutes")
    parser.add_argument("--all", action="store_true", help="measure mechanisms also at sizes without room")
    parser.add_argument("--data", metavar="SOURCE", help="images, as --data.source: train and score as well")
    parser.add_argument("--hours", type=float, default=0.5, help="time limit of all this training (%(default)s)")
    parser.add_argument("--threads", type=int, help="torch's threads on a CPU (torch's default; one if busy)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder of the report (advise/DATE)")
    args = parser.parse_args(argv)

    from tqdm.auto import tqdm

    from linvit.advice.advise import advise
    from linvit.cli.spec import parse_sizes, read_spec, usable_device
    from linvit.io.machine import keep_memory
    from linvit.registry import attentions

    if usable_device(args.device) == "cpu":
        keep_memory()
    given: Any = [read_spec(attentions, each) for each in args.attention] if args.attention else None

    def say(text: str) -> None:
        tqdm.write(reflow(f"[{time.monotonic() - begun:.0f} s] {text}"))
        sys.stdout.flush()

    advice = advise(
        args.model,
        None if args.img_size is None else parse_sizes("--img_size", args.img_size),
        mode=args.mode,
        device=args.device,
        dtype=args.dtype,
        batch_size=args.batch_size,
        attention="*" if given == ["*"] else given,
        minutes=args.minutes,
        smaller_model=args.smaller,
        compile=args.compile,
        all_sizes=args.all,
        threads=args.threads,
        data=args.data,
        hours=args.hours,
        say=say,
    )
    print(f"\n{advice}")
    folder = args.output or Path("advise") / datetime.now(UTC).strftime("%Y-%m-%d-%H%M%S")
    advice.write(folder)
    print(f"\nall rows and a picture: {folder / 'advise.html'}")
    return CTRL_C if advice.stopped == "interrupted" else 0
