"""Something that is wrong with an installation, and how to mend it."""

from typing import NamedTuple


class Problem(NamedTuple):
    """Something that is wrong.

    Attributes:
        what: In words.
        remedy: In words, or a command.
    """

    what: str
    remedy: str
