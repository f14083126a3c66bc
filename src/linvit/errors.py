"""The one kind of error that is the user's to mend: it says what was given, what is allowed, and a way out."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in a name, an option, a path or a shape. The command line prints it without a traceback.

    It is no `ValueError`: argument parsers catch those and bury the message among their own.
    """


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Returns `" Did you mean 'focused'?"` for the nearest known name, or an empty string if none is near."""
    known = list(known)
    begun = [name for name in known if given and name.startswith(given)]  # "focusing" is the start of "focusing_factor"
    nearest = begun if len(begun) == 1 else difflib.get_close_matches(given, known, n=1)
    return f" Did you mean '{nearest[0]}'?" if nearest else ""


def check_choice(option: str, given: str, allowed: Iterable[str]) -> None:
    """Raises a `UserError` unless `given` is one of `allowed`."""
    allowed = list(allowed)
    if given not in allowed:
        hint = did_you_mean(str(given), allowed)
        raise UserError(f"{option} must be one of {', '.join(allowed)}; got {given!r}.{hint}")
