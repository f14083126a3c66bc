"""Error for mistakes that the user can correct, with the given value, the allowed ones, and a solution."""

import difflib
import errno
import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

from linvit.io.plain_text import printable

_SPACE = "Free some space there, or choose another folder; existing files are unchanged"
_ELSEWHERE = "Choose another file or folder, or change its permissions"
WAYS: dict[int | None, str] = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: _SPACE,
    errno.EIO: f"The disk or its file system refuses. {_SPACE}",
    errno.EROFS: _ELSEWHERE,
    errno.EACCES: _ELSEWHERE,
    errno.EPERM: _ELSEWHERE,
    errno.EISDIR: "A file is expected",
    errno.ENOTDIR: "A folder is expected",
    errno.EINVAL: "Name a regular file",
    errno.EMFILE: "Raise the limit of open files (ulimit -n), or use fewer loader processes or smaller batches",
    errno.ENFILE: "The machine has too many files open",
}
"""Advice for errors of the system about files, by error number."""
TOO_MANY = ("Too many open files", "items of ancdata")
"""Texts of errors of torch and Python about open files that have no number (`errno`)."""


class UserError(Exception):
    """Mistake in a name, an option, a path or a shape. The command line prints it without a traceback.

    It is not a `ValueError`, because argument parsers catch those and replace the message. Text quoted from files
    is printable.
    """

    def __str__(self) -> str:
        """Returns the message."""
        return printable(super().__str__())


def find_user_error(error: BaseException | None) -> UserError | None:
    """Returns the user's mistake behind an exception that a library may have wrapped, or the error of the system."""
    found = error
    while found is not None and not isinstance(found, UserError):
        found = found.__cause__
    while found is None and error is not None:
        if isinstance(error, OSError) and error.errno in WAYS:
            name = f"'{error.filename}': " if error.filename is not None else ""
            found = UserError(f"{name}{error.strerror}. {WAYS[error.errno]}")
        elif isinstance(error, RuntimeError) and any(text in str(error) for text in TOO_MANY):
            found = UserError(f"{TOO_MANY[0]}. {WAYS[errno.EMFILE]}")
        error = error.__cause__
    return found


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Returns `" Did you mean 'focused'?"` for the nearest known name, or an empty string if none is similar."""
    known = list(known)
    begun = [name for name in known if given and name.startswith(given)]  # "focusing" is the start of "focusing_factor"
    nearest = begun if len(begun) == 1 else difflib.get_close_matches(given, known, n=1)
    return f" Did you mean '{nearest[0]}'?" if nearest else ""


def quote_first(names: Sequence[str], shown: int = 5) -> str:
    """Returns the first few of many names, in quotes, and the number of the others."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(f"'{name}'" for name in names[:shown]) + more


def check_choice(option: str, given: str, allowed: Iterable[str]) -> None:
    """Raises a `UserError` unless `given` is one of `allowed`."""
    allowed = list(allowed)
    if given not in allowed:
        hint = did_you_mean(str(given), allowed)
        raise UserError(f"{option} must be one of {', '.join(allowed)}; got {given!r}.{hint}")


def check_number(
    option: str,
    given: object,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
    whole: bool = False,
    note: str = "",
) -> None:
    """Raises a `UserError` unless `given` is a finite number, not a bool, within bounds; `note` adds its purpose."""
    fits = isinstance(given, Integral if whole else Real) and not isinstance(given, bool) and math.isfinite(given)
    if fits and at_least <= given <= at_most and above < given < below:  # type: ignore[operator]
        return
    lower = f"at least {at_least:g}" if at_least > above else f"above {above:g}"
    upper = f"at most {at_most:g}" if at_most < below else f"below {below:g}"
    bounds = [text for text in (lower, upper) if "inf" not in text]
    kind = f"a {'whole ' if whole else ''}number{' ' * bool(bounds)}{' and '.join(bounds)}"
    raise UserError(f"{option} must be {kind}{note}; got {given!r}")


def check_range(option: str, given: Sequence[float], at_most: float = math.inf, above: float = 0) -> None:
    """Raises a `UserError` unless `given` is [low, high], within the bounds."""
    if not above < given[0] <= given[1] <= at_most:
        upper = "" if at_most == math.inf else f" <= {at_most:g}"
        raise UserError(f"{option} must be [low, high] with {above:g} < low <= high{upper}; got {list(given)}")


def check_odd(option: str, given: object, examples: str) -> None:
    """Raises a `UserError` unless `given` is an odd positive number, such as the side of a kernel with a centre."""
    if not isinstance(given, Integral) or isinstance(given, bool) or given < 1 or given % 2 == 0:
        raise UserError(f"{option} must be odd and positive, such as {examples}; got {given!r}")
