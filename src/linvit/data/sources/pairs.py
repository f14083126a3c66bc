"""Folders of images and folders of masks, paired by the names of their files."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import datasets
from lightning.pytorch.utilities import rank_zero_warn

from linvit.data.sources.folder import files_below, holds_images, path_table
from linvit.data.sources.splits import SPLITS, load_splits, local_folder, source_kind
from linvit.errors import UserError, quote_first
from linvit.io.reading import read_text

IMAGE_FOLDERS = ("images", "image", "imgs", "img", "img_dir", "src", "leftImg8bit")
"""Names of image folders; MACU-Net's program has `src`, Cityscapes `leftImg8bit`."""
MASK_FOLDERS = ("annotations", "masks", "mask", "labels", "label", "ann_dir", "gt", "lab", "gtFine")
"""Names of mask folders; MACU-Net's program has `lab`, Cityscapes `gtFine`."""
BESIDE = (*MASK_FOLDERS, "annot")
"""Suffixes of mask folders after the name of their split: CamVid's are `trainannot` or `train_labels`."""
IMAGE_SUFFIX = "_leftImg8bit"
"""Suffix of Cityscapes' image names that their masks do not have."""
VOC_LISTS, VOC_FOLDERS = Path("ImageSets", "Segmentation"), ("JPEGImages", "SegmentationClass")


class Folders(NamedTuple):
    """Folders of the images and masks of a split (None: no masks), and the file that lists the split's names."""

    images: Path
    masks: Path | None
    names: Path | None = None


def load_pairs(source: str, mask_suffix: str = "") -> dict[str, datasets.Dataset]:
    """Returns the splits of a folder of images and masks, or of anything that `load_splits` knows."""
    path = local_folder(source)
    found = split_folders(path) if path else {}
    if path is None or not found or (source_kind(path) and not any(folders.masks for folders in found.values())):
        return load_splits(source, classes=False)
    return {name: pairs(folders, mask_suffix, name) for name, folders in found.items()}


def has_masks(source: str) -> bool:
    """True if a data source is a folder of images and masks: labels/ may hold annotations of objects instead."""
    path = local_folder(source)
    found = {} if path is None else split_folders(path)
    return any(folders.masks and holds_images(folders.masks) for folders in found.values())


def split_folders(path: Path) -> dict[str, Folders]:
    """Folders of the images and masks of each split, found by their names; none if they have other names.

    Known are `images/SPLIT` with `masks/SPLIT`, `SPLIT/images` with `SPLIT/masks`, and without splits, which is train;
    `SPLIT` with `SPLITannot` or `SPLIT_labels`, as of CamVid; and Pascal VOC's `JPEGImages` and `SegmentationClass`
    with `ImageSets/Segmentation/SPLIT.txt`, or CVAT's `default.txt`, or without lists.
    """
    voc = Folders(path / VOC_FOLDERS[0], path / VOC_FOLDERS[1])
    if voc.masks is not None and voc.masks.is_dir() and voc.images.is_dir():
        lists = {file.stem: file for file in (path / VOC_LISTS).glob("*.txt")}
        known = [name for name in ("train", "val") if name in lists]
        return {name: voc._replace(names=lists.get(name, lists.get("default"))) for name in known or ["train"]}
    images, masks = child(path, IMAGE_FOLDERS), child(path, MASK_FOLDERS)
    if images is not None:
        return by_split(images, masks) or {"train": Folders(images, masks)}
    found = by_name(path)
    if any(folders.masks for folders in found.values()):
        return found
    found = {}
    for name, folder in children(path).items():
        images = child(folder, IMAGE_FOLDERS)
        if images is not None:
            found[name] = Folders(images, child(folder, MASK_FOLDERS))
    return found


def by_name(path: Path) -> dict[str, Folders]:
    """Returns the folders of splits side by side: `train` or `train_images`, and `trainannot` or similar."""
    found: dict[str, Folders] = {}
    for name, aliases in SPLITS.items():
        for alias in aliases:
            images = child(path, (alias, *(f"{alias}_{kind}" for kind in IMAGE_FOLDERS)))
            if images is not None:
                masks = child(path, tuple(f"{alias}{between}{kind}" for kind in BESIDE for between in ("", "_", "-")))
                found.setdefault(name, Folders(images, masks))
    return found


def by_split(images: Path, masks: Path | None) -> dict[str, Folders]:
    """Returns the folders of the splits within one folder of images and one of masks."""
    labelled = {} if masks is None else children(masks)
    return {name: Folders(folder, labelled.get(name)) for name, folder in children(images).items()}


def children(path: Path) -> dict[str, Path]:
    """Returns the folders of the splits in a folder, by the names train, val and test."""
    found = {name: child(path, aliases) for name, aliases in SPLITS.items()}
    return {name: folder for name, folder in found.items() if folder is not None}


def child(path: Path, names: tuple[str, ...]) -> Path | None:
    """Returns the first folder in `path` that has one of these names."""
    return next((path / name for name in names if (path / name).is_dir()), None)


def pairs(folders: Folders, suffix: str, split: str) -> datasets.Dataset:
    """Returns a table of `image` and `mask`, of files with equal names except for the extension, sorted by name."""
    images = by_stem(folders.images, IMAGE_SUFFIX)
    masks = {} if folders.masks is None else by_stem(folders.masks, suffix)
    if folders.names is not None:
        named = read_text(folders.names).split()
        if missing := [stem for stem in named if stem not in images]:
            raise UserError(f"'{folders.names}' names images that '{folders.images}' lacks: {quote_first(missing)}")
        images, masks = ({stem: own[stem] for stem in named if stem in own} for own in (images, masks))
    if not images:
        raise UserError(f"there are no images in '{folders.images}'")
    if folders.masks is None:
        rank_zero_warn(f"the {split} images in '{folders.images}' have no folder of masks")
        return path_table({"image": [*images.values()]})
    if not masks:
        raise UserError(f"there are no masks in '{folders.masks}' for the {split} images in '{folders.images}'")
    if alone := sorted(images.keys() ^ masks.keys()):
        raise UserError(
            f"images in '{folders.images}' and masks in '{folders.masks}', of the {split} split, do not belong "
            f"together: {len(images.keys() - masks.keys())} of {len(images)} images have no mask of the same name, and "
            f"{len(masks.keys() - images.keys())} of {len(masks)} masks no image, such as {quote_first(alone, 3)}. "
            f"If the folders are classes, use ClassificationData with --data.num_classes=N. {_ending(images, masks)}"
        )
    return path_table({"image": [*images.values()], "mask": [masks[stem] for stem in images]})


def _ending(images: Mapping[str, str], masks: Mapping[str, str]) -> str:
    """Says what to do about names that differ, such as the suffix to set if names of all masks have one."""
    first = min(images)
    endings = sorted({mask.removeprefix(first) for mask in masks if mask.startswith(first)} - {""})
    if found := [ending for ending in endings if all(f"{stem}{ending}" in masks for stem in images)]:
        way = "set" if len(found) == 1 else "choose the one that says the classes, as in"
        return f"Names of masks end with {quote_first(found)}: {way} --data.mask_suffix={found[0]}"
    if images.keys() <= masks.keys():
        return "Remove the masks without an image, or add their images"
    if {os.path.basename(stem) for stem in images} <= {os.path.basename(stem) for stem in masks}:
        return "Masks and images of the same name are in different subfolders: give both folders the same subfolders"
    return "If names of masks have a suffix that those of images lack, set it, as in --data.mask_suffix=_mask"


def by_stem(folder: Path, suffix: str = "", pattern: str = "(.*)") -> dict[str, str]:
    """Returns sorted image files below a folder by stem (with the suffix, if any) or by a pattern's group in it."""
    found: dict[str, str] = {}
    stems = {path: path[len(str(folder.absolute())) + 1 :].rpartition(".")[0] for path in files_below(folder)}
    for path in [path for path, stem in stems.items() if stem.endswith(suffix)] or stems:
        if match := re.search(pattern, stems[path].removesuffix(suffix)):
            if match[1] in found:
                raise UserError(f"'{found[match[1]]}' and '{path}' are both called {match[1]}; remove one of them")
            found[match[1]] = path
    return found
