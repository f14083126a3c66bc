"""The pictures of attention: what is drawn, where it is written, and what is left out."""

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from linvit import UserError
from linvit.analysis.maps import Query
from linvit.analysis.recorder import observe
from linvit.callbacks import AttentionMaps
from linvit.callbacks.attention.maps import SIDE, attention_maps, gallery, marked, over
from tests.helpers import randn
from tests.training import TINY, Memory, fit, tiny_task

IMAGE = np.zeros((16, 16, 3), np.uint8)


def test_pictures_are_written_and_shown(tmp_path):
    task = tiny_task(backbone={**TINY, "depth": 2}, attention=["linear", "hydra"])
    callback = AttentionMaps(every_n_steps=2, images=3, max_share=None)
    fit(task, tmp_path, 24, logger=TensorBoardLogger(tmp_path, "", "run"), callbacks=[callback])
    files = sorted(path.name for path in (tmp_path / "run" / "attention_maps").iterdir())
    assert files == [f"000000{step}_{kind}.png" for step in (0, 2) for kind in ("focus", "weights")]
    width, height = Image.open(tmp_path / "run" / "attention_maps" / files[0]).size
    assert (width // SIDE, height // SIDE) == (4, 3)  # image, two layers and rollout; three images
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert {"attention/focus", "attention/weights"} <= set(events.Tags()["images"])


def test_a_map_lies_over_its_image():
    weights = torch.zeros(4, 4)
    weights[1, 3], weights[0, 0] = 2.0, -5.0
    tile = np.asarray(over(IMAGE, weights))
    brightest = np.unravel_index(tile.sum(-1).argmax(), (SIDE, SIDE))
    assert (brightest[0] * 4 // SIDE, brightest[1] * 4 // SIDE) == (1, 3)
    assert (tile[0, 0] == tile[-1, 0]).all(), "a negative weight is drawn as 0"


@pytest.mark.parametrize("size", [(16, 32), (32, 16), (200, 1)])
def test_a_picture_that_is_not_square_is_not_squeezed(size):
    height, width = (max(round(SIDE * side / max(size)), 1) for side in size)
    image = np.zeros((*size, 3), np.uint8)
    assert over(image, torch.ones(2, 4)).size == (width, height)
    ring = np.asarray(marked(image, (0.5, 0.25))).any(-1).nonzero()
    assert abs(np.mean(ring[0]) - height / 2) <= 1
    assert size[1] < 16 or abs(np.mean(ring[1]) - width / 4) <= 1


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_what_is_not_finite_or_nothing_is_drawn(value):
    assert over(IMAGE, torch.full((4, 4), value)).size == (SIDE, SIDE)


def test_what_is_not_defined_is_left_out_by_name():
    task = tiny_task(attention={"name": "enhanced_linear", "scales": [3]})
    found = attention_maps(IMAGE, observe(task.network, randn(1, 3, 16, 16).float()), Query(), max_tokens=16)
    assert set(found.maps) == {"weights"}
    assert found.left_out == {"rollout": "17 tokens are more than max_tokens=16"}
    assert gallery([found], "weights").width // SIDE == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [([0.5], "query has two fractions"), ([0.5, 2], "query: a fraction must be"), ([-1, 0], "query: a fraction must")],
)
def test_a_query_outside_the_image_is_a_user_error(given, message):
    with pytest.raises(UserError, match=message):
        AttentionMaps(query=given)


def test_training_is_bit_identical(tmp_path):
    weights = []
    for callbacks in ([], [AttentionMaps(1, images=2, max_share=None)]):
        task = tiny_task(attention="focused", drop_path_rate=0.3, mixup_alpha=0.5)
        fit(task, tmp_path, 24, callbacks=callbacks, logger=Memory(), precision="bf16-mixed")
        weights.append(task.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(*(w.values() for w in weights), strict=True))
