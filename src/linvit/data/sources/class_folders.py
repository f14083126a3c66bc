"""Finds which folders of a set of images are its classes, and which of them are empty."""

from typing import NamedTuple

from linvit.errors import quote_first


class Listing(NamedTuple):
    """What lies directly in one folder."""

    images: list[str]  # names
    ignored: list[str]  # names of files that are neither images nor text
    folders: list[str]  # names
    broken: list[str]  # names of links that lead nowhere
    others: bool  # whether there are files that only `datasets` knows how to use: metadata, archives
    changed: int  # of the folder, in nanoseconds


class FoundClasses(NamedTuple):
    """What the folders of a set say.

    Attributes:
        names: Classes, sorted; none if there are no two.
        splits: Those whose images have classes.
        warnings: What may be wrong, in sentences.
    """

    names: list[str]
    splits: set[str]
    warnings: list[str]


def find_classes(trees: dict[str, dict[str, Listing]], source: str) -> FoundClasses:
    """The classes of a set, which are the names of the folders that its images lie in.

    The images of a split have classes if all lie equally deep, and below the folder of the split. A tree has the
    folders of a split by their paths, its own first.
    """
    names: set[str] = set()
    splits, warnings = set(), []
    for split, tree in trees.items():
        top = next(iter(tree)).count("/")
        filled = {folder.count("/") - top: folder for folder, listing in tree.items() if listing.images}
        if len(filled) > 1:
            warnings.append(
                f"the {split} images of '{source}' have no classes: they lie at different depths, such as in "
                f"'{filled[min(filled)]}' and in '{filled[max(filled)]}'"
            )
        depth = max(filled, default=1)
        if depth == 0 or len(filled) > 1:
            continue
        level = {folder: listing for folder, listing in tree.items() if folder.count("/") - top == depth}
        full = {folder.rpartition("/")[2] for folder, listing in level.items() if listing.images}
        names |= full
        splits |= {split} if full else set()
        empty = sorted(folder for folder, listing in level.items() if not listing.images)
        if empty:
            warnings.append(f"no images lie in {quote_first(empty)}: fill or remove these folders")
        above = {folder: listing for folder, listing in tree.items() if folder.count("/") - top == depth - 1}
        broken = sorted(f"{folder}/{name}" for folder, listing in above.items() for name in listing.broken)
        if broken:
            warnings.append(f"links lead nowhere: {quote_first(broken)}: repair or remove them")
    labelled = len(names) > 1
    return FoundClasses(sorted(names) if labelled else [], splits if labelled else set(), warnings)
