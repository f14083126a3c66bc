"""Finds configurations by path, or by the name of one that comes with linvit."""

import re
from pathlib import Path

from linvit.errors import UserError, did_you_mean

PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parents[1] / "configs"
"""The configurations that come with linvit: a wheel has them in the package, a checkout beside `src`."""

FIELD = re.compile(r"^# (\w+):\s+(.*)$", re.MULTILINE)


def names() -> list[str]:
    """Names of the configurations that come with linvit, such as `quickstart` and `imagenet/swin_tiny`, sorted."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def shipped(name: str) -> Path | None:
    """The file of a configuration that comes with linvit, or None; `.yaml` may be left out."""
    return FOLDER / f"{name}.yaml" if (name := name.removesuffix(".yaml")) in names() else None


def find(given: str, folder: Path | None = None) -> Path | None:
    """The file that a path or a name means: the file at the path, else one that comes with linvit, else None.

    Args:
        given: A path, or a name such as `imagenet/swin_tiny`.
        folder: What a relative path is relative to; None is the current folder.
    """
    path = Path(given) if folder is None else folder / given
    return path if path.is_file() else shipped(given)


def config_file(given: str) -> Path:
    """The same as `find`.

    Raises:
        UserError: If there is none.
    """
    path = find(given)
    if path is None:
        raise UserError(f"no configuration is called '{given}', and there is no such file.{near(given)}")
    return path


def near(given: str) -> str:
    """Names the nearest configuration that comes with linvit, and the command that lists all."""
    name = given.removesuffix(".yaml").rpartition("configs/")[2]
    return f"{did_you_mean(name, names())} linvit list configs names those that come with linvit"


def heading(text: str) -> dict[str, str]:
    """The fields in the opening comment of a configuration, such as `# Paper: ...`; the first line of each."""
    return dict(FIELD.findall(text))
