"""Weights of one image size in a model for another."""

from linvit.attention.base import Grid
from linvit.errors import UserError
from linvit.testing.attention.inputs import AttentionSubject, inputs
from linvit.testing.numbers import EXACT, relative_error
from linvit.testing.report import Line, failed, passed, refusable
from linvit.testing.subject import sized

OLD, NEW = Grid((18, 18)), Grid((16, 17))
"""Both have more patches than Linformer's 256 rows, which more patches cannot change; the new one has fewer, so that
tables of which a mechanism takes the first entries follow, too."""


@refusable
def resizes_its_tables(subject: AttentionSubject) -> Line:
    """A state dict of another grid fits after `resize_tables`, and computes what the old instance computes there."""
    old, new = subject.build(OLD), subject.build(NEW, seed=1)
    shapes = {name: tensor.shape for name, tensor in new.state_dict().items()}
    tables = [name for name, tensor in old.state_dict().items() if tensor.shape != shapes.get(name)]
    if not tables:
        return passed("no parameter has a shape that depends on the grid")
    state = new.resize_tables(old.state_dict(), lambda count: OLD.size if count == OLD.num_keys else None)
    for name in tables:
        if name not in shapes:
            return failed(f"{name} is there at {sized(OLD)} and not at {sized(NEW)}; let the grid decide shapes only")
        if name not in state or state[name].shape != shapes[name]:
            got = f"{tuple(state[name].shape)}" if name in state else "nothing"
            return failed(
                f"{name} of {sized(OLD)} is {got} for {sized(NEW)} and should be {tuple(shapes[name])}, so weights of "
                f"another image size do not fit: override resize_tables"
            )
    new.load_state_dict(state)
    names = ", ".join(tables)
    try:
        want = inputs(old, NEW)(old)
    except UserError:
        return passed(f"{names} from {sized(OLD)} to {sized(NEW)}")
    left = relative_error(inputs(new, NEW)(new), want)
    if not left <= EXACT:
        return failed(
            f"with {names} resized, the output at {sized(NEW)} differs by {left:.0e} from that of the instance for "
            f"{sized(OLD)} (at most {EXACT:.0e}); resize in resize_tables as in forward"
        )
    return passed(f"{names} from {sized(OLD)} to {sized(NEW)}, where the output is the same to {left:.0e}")
