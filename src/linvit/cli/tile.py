"""`linvit data tile`: cuts the large pictures of the ISPRS sets into tiles, once."""

import argparse
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from linvit.data.sources.class_names import read_names
from linvit.data.sources.isprs import SETS, areas, cut
from linvit.errors import UserError

EPILOG = """examples:
  linvit data tile vaihingen --images top --masks gts --eval_masks gts_eroded \\
      --output data/vaihingen
  linvit data tile potsdam --images 2_Ortho_RGB --masks 5_Labels_all \\
      --output data/potsdam --size 512 --stride 256

The output is a folder of images and masks for --data.source, with the classes
of --data.class_names=isprs. Training tiles overlap where the stride is less
than the size; tiles of validation and test do not, so each pixel counts once.
"""


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb to `linvit data`."""
    tile = verbs.add_parser(
        "tile",
        help="cut ISPRS Vaihingen or Potsdam into tiles",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tile.add_argument("set", choices=sorted(SETS))
    tile.add_argument("--images", type=Path, required=True, help="folder of the pictures: IR-R-G or RGB, .tif")
    tile.add_argument("--masks", type=Path, required=True, help="folder of the colour-coded masks")
    tile.add_argument("--eval_masks", type=Path, help="masks of validation and test: those with eroded boundaries")
    tile.add_argument("--output", type=Path, required=True, help="a folder that does not exist yet")
    tile.add_argument("--size", type=int, default=1024, help="side of a tile (default: %(default)s)")
    tile.add_argument("--stride", type=int, default=512, help="step between training tiles (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Cuts all pictures; prints what was written and returns 0.

    Raises:
        UserError: If the sizes make no sense, the output exists, or pictures or masks are missing or wrong.
    """
    if not 0 < args.stride <= args.size:
        raise UserError(
            f"--stride must lie between 1 and --size={args.size}, or pixels are left out; got {args.stride}"
        )
    if args.output.exists():
        raise UserError(f"'{args.output}' exists; remove it, or choose another --output")
    tiles: Counter[str] = Counter()
    for area in tqdm(areas(SETS[args.set], args.images, args.masks, args.eval_masks), unit=" pictures"):
        count, strays = cut(area, args.size, args.stride, args.output)
        tiles[area.split] += count
        if strays:
            tqdm.write(f"{area.mask}: {strays:,} pixels have a colour of no class, and are ignored")
    counted = ", ".join(f"{split} {tiles[split]:,}" for split in ("train", "val", "test"))
    print(f"wrote {tiles.total():,} tiles to {args.output} ({counted}) of the classes {', '.join(read_names('isprs'))}")
    return 0
