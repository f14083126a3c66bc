"""How many classes the weights of a head are for."""

import pytest

import linvit
from linvit.registry import heads
from linvit.registry.signatures import takes
from tests.helpers import own_names


@pytest.mark.parametrize("name", own_names(heads))
def test_weights_tell_how_many_classes_they_are_for(name: str) -> None:
    small = {option: 8 for option in ("width", "fc_width") if takes(heads.get(name), option)}
    head = linvit.create_head(
        {"name": name, **small}, channels=[8, 16, 24, 32], reductions=[4, 8, 16, 32], num_classes=5
    )
    assert head.classes_in(head.state_dict()) == 5
    assert head.classes_in({}) == 0
