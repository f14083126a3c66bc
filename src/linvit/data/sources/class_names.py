"""Names of classes, from a file or of a known set."""

from pathlib import Path

from linvit.errors import UserError

KNOWN = Path(__file__).parents[1] / "class_names"


def read_names(given: str) -> list[str]:
    """The names of a known set, or the lines of a file that are not empty.

    Raises:
        UserError: If it is neither.
    """
    known = KNOWN / f"{given}.txt"
    try:
        lines = (known if known.is_file() else Path(given).expanduser()).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        sets = ", ".join(sorted(file.stem for file in KNOWN.glob("*.txt")))
        raise UserError(
            f"cannot read class_names from '{given}': {error}. Give a list, a file with a name per line, or: {sets}"
        ) from error
    return [line.strip() for line in lines if line.strip()]
