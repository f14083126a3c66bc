"""Folders of images and folders of masks, paired by the names of their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import datasets
from lightning.pytorch.utilities import rank_zero_warn

from linvit.data.sources.folder import files_below, path_table
from linvit.data.sources.splits import HUB, SPLITS, load_splits
from linvit.errors import UserError, quote_first

IMAGE_FOLDERS = ("images", "image", "imgs", "img", "img_dir", "src", "leftImg8bit")
"""What folders of images are called; MACU-Net's program has `src`, Cityscapes `leftImg8bit`."""
MASK_FOLDERS = ("annotations", "masks", "mask", "labels", "label", "ann_dir", "gt", "lab", "gtFine")
"""What folders of masks are called; MACU-Net's program has `lab`, Cityscapes `gtFine`."""
IMAGE_SUFFIX = "_leftImg8bit"
"""What names of Cityscapes' images have that their masks have not."""
VOC_LISTS, VOC_FOLDERS = Path("ImageSets", "Segmentation"), ("JPEGImages", "SegmentationClass")
LOSSY_ENDINGS = (".jpg", ".jpeg", ".jp2", ".webp", ".avif")


class Folders(NamedTuple):
    """Where the images and the masks of a split lie, None for no masks, and the file that names those of the split."""

    images: Path
    masks: Path | None
    names: Path | None = None


def load_pairs(source: str, mask_suffix: str = "") -> dict[str, datasets.Dataset]:
    """The splits of a folder of images and masks, or of anything that `load_splits` knows."""
    path = Path(source).expanduser()
    found = {} if source.startswith(HUB) or not path.is_dir() else split_folders(path)
    if not any(folders.masks for folders in found.values()):
        return load_splits(source)
    return {name: pairs(folders, mask_suffix, name) for name, folders in found.items()}


def has_masks(source: str) -> bool:
    """Whether a data source is a folder of images and masks."""
    path = Path(source).expanduser()
    return path.is_dir() and any(folders.masks for folders in split_folders(path).values())


def split_folders(path: Path) -> dict[str, Folders]:
    """Where the images and masks of each split lie, by the names of the folders; nothing if they have other names.

    Known are `images/SPLIT` with `masks/SPLIT`, `SPLIT/images` with `SPLIT/masks`, and without splits, which is train;
    and Pascal VOC's `JPEGImages` and `SegmentationClass` with `ImageSets/Segmentation/SPLIT.txt`.
    """
    if (lists := path / VOC_LISTS).is_dir():
        files = [file for name in ("train", "val") if (file := lists / f"{name}.txt").is_file()]
        return {file.stem: Folders(path / VOC_FOLDERS[0], path / VOC_FOLDERS[1], file) for file in files}
    images, masks_beside = child(path, IMAGE_FOLDERS), child(path, MASK_FOLDERS)
    if images is not None and masks_beside is not None:
        return by_split(images, masks_beside) or {"train": Folders(images, masks_beside)}
    found = {}
    for name, folder in children(path).items():
        images = child(folder, IMAGE_FOLDERS)
        if images is not None:
            found[name] = Folders(images, child(folder, MASK_FOLDERS))
    return found


def by_split(images: Path, masks: Path) -> dict[str, Folders]:
    """The folders of the splits within one folder of images and one of masks."""
    labelled = children(masks)
    return {name: Folders(folder, labelled.get(name)) for name, folder in children(images).items()}


def children(path: Path) -> dict[str, Path]:
    """The folders of the splits in a folder, by the names train, val and test."""
    found = {name: child(path, aliases) for name, aliases in SPLITS.items()}
    return {name: folder for name, folder in found.items() if folder is not None}


def child(path: Path, names: tuple[str, ...]) -> Path | None:
    """The first folder in `path` that has one of these names."""
    return next((path / name for name in names if (path / name).is_dir()), None)


def pairs(folders: Folders, suffix: str, split: str) -> datasets.Dataset:
    """A table of `image` and `mask`, of files that are called alike but for the extension; sorted by name."""
    images = by_stem(folders.images, IMAGE_SUFFIX)
    if folders.names is not None:
        named = folders.names.read_text(encoding="utf-8").split()
        if missing := [stem for stem in named if stem not in images]:
            raise UserError(f"'{folders.names}' names images that '{folders.images}' lacks: {quote_first(missing)}")
        images = {stem: images[stem] for stem in named}
    if not images:
        raise UserError(f"there are no images in '{folders.images}'")
    columns = {"image": [*images.values()]}
    if folders.masks is not None:
        masks = by_stem(folders.masks, suffix)
        if folders.names is not None:
            masks = {stem: masks[stem] for stem in images if stem in masks}
        lossy = [path for path in masks.values() if path.lower().endswith(LOSSY_ENDINGS)]
        if lossy:
            raise UserError(
                f"masks must be saved without loss, as PNG: {quote_first(lossy, 3)} have other labels at edges than "
                f"they had before they were saved, which these files do not have any more"
            )
        alone = [images[stem] for stem in images.keys() - masks.keys()]
        without = [masks[stem] for stem in masks.keys() - images.keys()]
        if alone or without:
            hint = (
                ""
                if suffix or not without
                else "; if names of masks have an ending more than those of images, it is --data.mask_suffix"
            )
            raise UserError(
                f"images and masks of the {split} split do not belong together: {len(alone)} of {len(images)} images "
                f"in '{folders.images}' have no mask of the same name in '{folders.masks}'"
                f"{f', such as {quote_first(sorted(alone), 3)}' if alone else ''}, and {len(without)} of {len(masks)} "
                f"masks have no image{f', such as {quote_first(sorted(without), 3)}' if without else ''}{hint}"
            )
        columns["mask"] = [masks[stem] for stem in images]
    else:
        rank_zero_warn(f"the {split} images in '{folders.images}' have no folder of masks")
    return path_table(columns)


def by_stem(folder: Path, suffix: str = "") -> Mapping[str, str]:
    """Image files below a folder by their path within it, without extension and suffix; sorted.

    If some of them have the suffix, the others are left out.
    """
    found: dict[str, str] = {}
    stems = {path: path[len(str(folder.absolute())) + 1 :].rpartition(".")[0] for path in files_below(folder)}
    ending = [path for path, stem in stems.items() if stem.endswith(suffix)]
    for path in ending or stems:
        stem = stems[path].removesuffix(suffix)
        if stem in found:
            raise UserError(f"'{found[stem]}' and '{path}' differ in their extension alone; remove one of them")
        found[stem] = path
    return found
