"""Where the files go that are written for predicted images."""

from pathlib import Path

from linvit.callbacks.prediction_writer import file_of


class PicturePaths:
    """Paths in a folder of a data source, such as `predictions_photos`. Images in folders below the source keep these.

    Args:
        folder: In which that folder is.
        source: Path or name of the data source, if it has one.

    Attributes:
        folder: Of the data source.
        count: Images so far.
    """

    def __init__(self, folder: Path, source: str | None) -> None:
        self.folder = folder / Path(file_of(source)).stem
        self.count = 0
        self._source = None if source is None else Path(source).absolute()  # as the paths of images are
        self._names: dict[str, int] = {}

    def __call__(self, name: str) -> Path:
        """The path of an image's files without their endings; a number is added where it came before."""
        inside = self._source is not None and Path(name).is_relative_to(self._source)
        kept = Path(name).relative_to(self._source) if inside else Path(Path(name).name)  # type: ignore[arg-type]
        stem = str(kept.with_suffix(""))
        self._names[stem] = number = self._names.get(stem, 0) + 1
        self.count += 1
        path = self.folder / (stem if number == 1 else f"{stem}_{number}")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
