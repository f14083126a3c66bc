"""`linvit data tile`: cuts large pictures with masks into tiles, once."""

import argparse
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from linvit.data.sources.labels import read_names
from linvit.data.sources.tiles import SETS, cut, find_areas, isprs_areas, read_classes, read_mask
from linvit.errors import UserError
from linvit.terminal import RAW

EPILOG = """examples:
  linvit data tile folder --images pictures --masks labels --val north \\
      --output data/tiles --size 512 --overlap 128
  linvit data tile vaihingen --images top --masks gts --eval_masks gts_eroded \\
      --output data/vaihingen
  linvit data tile potsdam --images 2_Ortho_RGB --masks 5_Labels_all \\
      --output data/potsdam --size 512 --stride 256

The output is a folder of images and masks for --data.source. Pictures keep
their bands, bits and georeference; masks of a folder keep their numbers or
colours (--data.mask_values), those of the ISPRS sets become the classes of
--data.class_names=isprs. Training tiles overlap where the stride is less than
the size; tiles of validation and test do not, so each pixel counts once.

Tiles are for training and scores. linvit predict takes the pictures as they
are, and gives one mask for each: --model.window=512 goes through them by
overlapping windows whose logits are averaged, and --model.stride is the step.
"""


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb to `linvit data`."""
    about = "cut large pictures with masks into tiles"
    tile = verbs.add_parser("tile", help=about, description=__doc__, epilog=EPILOG, formatter_class=RAW)
    tile.add_argument("set", choices=["folder", *sorted(SETS)], help="any folders, or a set of ISPRS with its splits")
    tile.add_argument("--images", type=Path, required=True, help="folder of the pictures, or of train/, val/, test/")
    tile.add_argument("--masks", type=Path, required=True, help="folder of the masks; of ISPRS, the colour-coded ones")
    tile.add_argument("--eval_masks", type=Path, help="of ISPRS: masks of validation and test, with eroded boundaries")
    tile.add_argument("--mask_suffix", default="", help="what names of masks have after that of their picture")
    tile.add_argument("--val", nargs="+", default=[], metavar="NAME", help="pictures of validation, without extension")
    tile.add_argument("--test", nargs="+", default=[], metavar="NAME", help="pictures of the test set")
    tile.add_argument("--output", type=Path, required=True, help="a folder that does not exist yet")
    tile.add_argument("--size", type=int, default=1024, help="side of a tile (default: %(default)s)")
    step = tile.add_mutually_exclusive_group()
    step.add_argument("--stride", type=int, help="step between training tiles (default: half of the size)")
    step.add_argument("--overlap", type=int, help="pixels that neighbouring training tiles share, in place of --stride")


def run(args: argparse.Namespace) -> int:
    """Cuts all pictures; prints what was written and returns 0."""
    stride = max(args.size // 2, 1) if args.stride is None else args.stride
    if args.overlap is not None:
        stride = args.size - args.overlap
    if not 0 < stride <= args.size:
        raise UserError(
            f"--stride must lie between 1 and --size={args.size}, or pixels are left out, and --overlap below "
            f"it; got a stride of {stride}"
        )
    if args.output.exists():
        raise UserError(f"'{args.output}' exists; remove it, or choose another --output")
    of_folder = args.set == "folder"
    if of_folder and args.eval_masks is not None:
        raise UserError("--eval_masks is of the ISPRS sets; put masks of validation and test into folders of splits")
    if not of_folder and (args.val or args.test or args.mask_suffix):
        raise UserError(f"{args.set} has splits and names of its own; leave --val, --test and --mask_suffix out")
    chosen = (
        find_areas(args.images, args.masks, args.mask_suffix, args.val, args.test)
        if of_folder
        else isprs_areas(SETS[args.set], args.images, args.masks, args.eval_masks)
    )
    tiles: Counter[str] = Counter()
    for area in tqdm(chosen, unit=" pictures"):
        mask, strays = (read_mask(area.mask), 0) if of_folder else read_classes(area.mask)
        tiles[area.split] += cut(area, mask, args.size, stride, args.output)
        if strays:
            tqdm.write(f"{area.mask}: {strays:,} pixels have a colour of no class, and are ignored")
    counted = ", ".join(f"{split} {tiles[split]:,}" for split in ("train", "val", "test"))
    classes = "" if of_folder else f" of the classes {', '.join(read_names('isprs'))}"
    print(f"wrote {tiles.total():,} tiles to {args.output} ({counted}){classes}")
    if not tiles["val"]:
        print(
            "WARNING: no picture is for validation. Tiles of one picture on both sides of a split are alike, so that "
            "the score says little: name pictures with --val"
        )
    return 0
