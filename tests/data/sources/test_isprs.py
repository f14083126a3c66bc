"""Pictures like ISPRS's, cut into tiles that segmentation data reads."""

import numpy as np
import pytest
from PIL import Image

from linvit.cli.data import main
from linvit.data import SegmentationData
from linvit.data.sources.tiles import BOUNDARY, ISPRS_COLOURS, offsets
from linvit.errors import UserError

AREAS = ("1", "3", "30", "2")  # two of training, one of validation, one of test
HEIGHT, WIDTH = 50, 70


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("top", "gts", "eroded"):
        (tmp_path / name).mkdir()
    for area in AREAS:
        labels = rng.integers(0, 6, (5, 7)).repeat(10, 0).repeat(10, 1)
        colours = np.array(ISPRS_COLOURS, np.uint8)[labels]
        name = f"top_mosaic_09cm_area{area}"
        Image.fromarray(colours // 2 + 20).save(tmp_path / "top" / f"{name}.tif")
        Image.fromarray(colours).save(tmp_path / "gts" / f"{name}.tif")
        colours[::10] = BOUNDARY
        Image.fromarray(colours).save(tmp_path / "eroded" / f"{name}_noBoundary.tif")
    return tmp_path


def tile(folder, *more, output="tiles"):
    paths = [f"--images={folder}/top", f"--masks={folder}/gts", f"--output={folder}/{output}"]
    return main(["tile", "vaihingen", *paths, "--size=32", "--stride=16", *more])


def test_tiles_are_segmentation_data(folder, capsys):
    assert tile(folder, f"--eval_masks={folder}/eroded") == 0
    assert "(train 24, val 6, test 6)" in capsys.readouterr().out
    made = SegmentationData(str(folder / "tiles"), class_names="isprs", img_size=32, batch_size=2, num_workers=0)
    made.setup("fit")
    assert made.num_classes == 6
    assert (len(made.train_set), len(made.val_set)) == (24, 6)
    train, val = ([samples[i]["mask"] for i in range(len(samples))] for samples in (made.train_set, made.val_set))
    assert all(mask.shape == (32, 32) for mask in train)
    assert sum(mask.numel() for mask in val) == HEIGHT * WIDTH  # each pixel once
    assert sum(int((mask == 255).sum()) for mask in val) == WIDTH * HEIGHT // 10
    sample = made.val_set[0]
    colours = np.array(ISPRS_COLOURS, np.uint8)[sample["mask"].clamp(max=5)]
    seen = (sample["mask"] != 255).numpy()
    assert (sample["image"].permute(1, 2, 0).numpy() == colours // 2 + 20)[seen].all()


def test_where_tiles_begin():
    assert list(offsets(70, 32, 16, shift=True)) == [0, 16, 32, 38]
    assert list(offsets(64, 32, 32, shift=True)) == [0, 32]
    assert list(offsets(70, 32, 32, shift=False)) == [0, 32, 64]
    assert list(offsets(20, 32, 16, shift=True)) == [0]


def test_stray_colours_are_ignored_if_they_are_few(folder, capsys):
    path = folder / "gts" / "top_mosaic_09cm_area1.tif"
    pixels = np.array(Image.open(path))
    pixels[3, :5] = (252, 255, 0)
    Image.fromarray(pixels).save(path)
    tile(folder)
    assert "5 pixels have a colour of no class" in "".join(capsys.readouterr())
    pixels[:20] = 7
    Image.fromarray(pixels).save(path)
    with pytest.raises(UserError, match=r"area1.tif.*40% of its pixels"):
        tile(folder, output="again")


def test_what_is_refused(folder):
    with pytest.raises(UserError, match="stride"):
        tile(folder, "--stride=40")
    (folder / "gts" / "top_mosaic_09cm_area3.tif").unlink()
    with pytest.raises(UserError, match=r"area3.tif' .train. has no mask"):
        tile(folder)
    with pytest.raises(UserError, match=r"no image in .* has a name of this set"):
        main(["tile", "potsdam", f"--images={folder}/top", f"--masks={folder}/gts", f"--output={folder}/x"])
    (folder / "full").mkdir()
    with pytest.raises(UserError, match="exists"):
        tile(folder, output="full")
