"""The constructor that hosts call, and the members that they use."""

import inspect

from linvit.testing.report import Line, failed, passed
from linvit.testing.subject import Subject

UNSET = inspect.Parameter.empty


def constructor(subject: Subject) -> Line:
    """Checks arguments, members and defaults, listing at once all that is missing, and what is built."""
    lacking = {name: use for name, use in subject.arguments.items() if not subject.takes(name)}
    own = {name: default for name, default in subject.parameters.items() if name not in subject.arguments}
    bare = [name for name, default in own.items() if default is UNSET and name not in subject.options]
    if bare and not lacking:
        return failed(f"no host supplies {', '.join(bare)}: give it a default")
    model = subject.model if all(map(subject.takes, subject.supplied)) else None
    members = dict(subject.methods)
    if model is not None:
        members = {**subject.attributes, **members}
    elif not isinstance(subject.constructor, type):
        members = {}
    owner = subject.constructor if model is None else subject.part(model)
    absent = {name: use for name, use in members.items() if not hasattr(owner, name)}
    said = [
        f"{what} no {', '.join(f'{name} ({use})' for name, use in missing.items())}"
        for what, missing in (("its constructor takes", lacking), ("it has", absent))
        if missing
    ]
    if said:
        return failed(f"{'; '.join(said)}. {subject.base} has all members to inherit")
    for name, want in subject.defaults.items():
        found = subject.parameters.get(name, want)
        if found != want:
            return failed(
                f"{name} has {'no default' if found is UNSET else f'the default {found!r}'} instead of {want!r}"
            )
    wrong = subject.wrong_kind(owner)
    options = ", ".join(f"{name}={default!r}" for name, default in own.items())
    return failed(wrong) if wrong else passed(options or "no options")
