"""Pictures of any folder cut into tiles: pixels, bands and georeference stay, and predicted masks have it, too."""

import numpy as np
import pytest
import rasterio
import torch
from PIL import Image

from linvit.callbacks import PredictionWriter
from linvit.cli.data import main
from linvit.errors import UserError
from linvit.io.rasters import georeference
from linvit.tasks import SegmentationTask
from tests.data import png
from tests.data.test_bands import FOUR, segmentation
from tests.rasters import CRS, ORIGIN, values, write
from tests.training import trainer


def tile(root, *options):
    given = ["--images", str(root / "images"), "--masks", str(root / "masks"), "--output", str(root / "out")]
    return main(["tile", "folder", *given, *options])


def save(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(array, **options)
    if options:
        picture.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    picture.save(path)


def test_geotiffs_keep_bands_bits_and_place(tmp_path, capsys):
    array, classes = values(height=40, width=50), np.arange(2000).reshape(40, 50).astype(np.uint8) % 3
    for name in ("north", "south"):
        write(tmp_path / "images" / f"{name}.tif", array)
        save(tmp_path / "masks" / f"{name}.png", classes)
    assert tile(tmp_path, "--size", "32", "--stride", "8", "--val", "north") == 0
    assert "wrote 12 tiles" in capsys.readouterr().out
    for split, count in (("train", 8), ("val", 4)):
        found = sorted((tmp_path / "out" / split / "images").iterdir())
        assert len(found) == count
        for path in found:
            top, left = map(int, path.stem.split("_")[1:])
            with rasterio.open(path) as file:
                assert file.crs.to_string() == CRS
                assert file.transform @ (0, 0) == ORIGIN @ (left, top)
                assert np.array_equal(file.read(), array[:, top : top + 32, left : left + 32])
            mask = np.asarray(Image.open(tmp_path / "out" / split / "masks" / f"{path.stem}.png"))
            assert np.array_equal(mask, classes[top : top + 32, left : left + 32])
    assert {path.stem for path in found} == {"north_0_0", "north_0_32", "north_32_0", "north_32_32"}  # without overlap


@pytest.mark.parametrize("kind", ["numbers", "16 bits", "palette", "colours"])
def test_masks_stay_as_they_are(tmp_path, kind, capsys):
    numbers = np.random.default_rng(0).integers(0, 3, (20, 20), dtype=np.uint8)
    array = {"16 bits": numbers.astype(np.uint16) * 300, "colours": np.stack([numbers] * 3, -1)}.get(kind, numbers)
    save(tmp_path / "images" / "a.png", np.stack([numbers] * 3, -1))
    save(tmp_path / "masks" / "a_mask.png", array, **({"mode": "P"} if kind == "palette" else {}))
    assert tile(tmp_path, "--size", "16", "--stride", "4", "--mask_suffix", "_mask") == 0
    assert "WARNING: no picture is for validation" in capsys.readouterr().out
    with Image.open(tmp_path / "out/train/masks/a_4_0.png") as mask:
        assert np.array_equal(np.asarray(mask), array[4:20, :16])
        assert mask.mode == {"palette": "P", "16 bits": "I;16", "colours": "RGB"}.get(kind, "L")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out/train/images/a_4_0.png"))[..., 0], numbers[4:20, :16])


def test_masks_of_few_bits_keep_their_numbers(tmp_path):
    """Pillow stretches 2 bits to 0, 85, 170 and 255."""
    numbers = np.random.default_rng(0).integers(0, 4, (8, 8))
    save(tmp_path / "images" / "a.png", np.zeros((8, 8, 3), np.uint8))
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "a.png").write_bytes(png.of_samples(numbers[..., None], 2, 0))
    assert tile(tmp_path, "--size", "8") == 0
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out" / "train" / "masks" / "a_0_0.png")), numbers)


@pytest.mark.parametrize("turned", ["images", "masks"])
def test_a_picture_that_viewers_turn_is_refused(tmp_path, turned):
    exif = Image.Exif()
    exif[274] = 3
    for kind in ("images", "masks"):
        save(tmp_path / kind / "a.png", np.zeros((8, 8), np.uint8))
    Image.new("L", (8, 8)).save(tmp_path / turned / "a.png", exif=exif)
    with pytest.raises(UserError, match=rf"{turned}/a\.png' is turned by its EXIF tag \(3\); save it upright"):
        tile(tmp_path, "--size", "8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--val", "b"], "there is no picture 'b'"),
        (["--size", "8", "--stride", "9"], "--stride must be between 1 and --size=8; got 9"),
        (["--size", "8", "--stride", "0"], "--size=8; got 0"),
        (["--eval_masks", "x"], "--eval_masks is for ISPRS datasets"),
        ([], "'.*a.png' has 8 x 9 pixels, but '.*a.png' 8 x 8"),
    ],
)
def test_mistakes(tmp_path, options, message):
    save(tmp_path / "images" / "a.png", np.zeros((8, 8, 3), np.uint8))
    save(tmp_path / "masks" / "a.png", np.zeros((9, 8), np.uint8))
    with pytest.raises(Exception, match=message):
        tile(tmp_path, *options)


def test_pictures_in_folders_below(tmp_path):
    for name in ("a/b", "c/b"):
        save(tmp_path / "images" / f"{name}.png", np.zeros((8, 8, 3), np.uint8))
        save(tmp_path / "masks" / f"{name}.png", np.zeros((8, 8), np.uint8))
    with pytest.raises(UserError, match=r"there is no picture 'a_b' in .*; it has 'a/b', 'c/b'"):
        tile(tmp_path, "--size", "8", "--val", "a_b")  # it was ignored
    assert tile(tmp_path, "--size", "8", "--val", "a/b") == 0
    assert (tmp_path / "out" / "val" / "masks" / "a_b_0_0.png").exists()


def test_tiles_of_two_pictures_have_two_names(tmp_path):
    """Those of the second took the place of the first's."""
    for name in ("a/b", "a_b"):
        save(tmp_path / "images" / f"{name}.png", np.zeros((8, 8, 3), np.uint8))
        save(tmp_path / "masks" / f"{name}.png", np.zeros((8, 8), np.uint8))
    with pytest.raises(UserError, match=r"tiles of '.*a.b\.png' and '.*a.b\.png' would both be called a_b; rename one"):
        tile(tmp_path, "--size", "8")
    assert not (tmp_path / "out").exists()


def test_a_predicted_mask_lies_where_its_picture_lies(tmp_path):
    """A picture larger than the window is predicted whole; one without a georeference gets a PNG."""
    write(tmp_path / "pictures" / "a.tif", values(height=40, width=50))
    write(tmp_path / "pictures" / "b.tif", values(), crs=None, transform=rasterio.Affine.identity())
    data = segmentation(tmp_path / "no", predict_path=str(tmp_path / "pictures"), **FOUR)
    task = SegmentationTask(
        backbone={"name": "pvt_v2_b0", "sr_ratios": [1, 1, 1, 1], "depths": [1, 1, 1, 1]},
        head="semantic_fpn",
        num_classes=2,
        img_size=32,
        in_chans=4,
        window=32,
    )
    with torch.no_grad():
        trainer(tmp_path, callbacks=[PredictionWriter(tmp_path / "predictions")]).predict(task, data)
    (folder,) = tmp_path.glob("predictions*/*")
    assert georeference(folder / "a.tif") == georeference(tmp_path / "pictures" / "a.tif")
    with rasterio.open(folder / "a.tif") as mask:
        assert mask.read().shape == (1, 40, 50)
        assert mask.read().max() <= 1
        assert mask.colormap(1)[1][:3] == (31, 119, 180)
    assert Image.open(folder / "b.png").size == (32, 24)
    assert {path.name for path in folder.iterdir()} == {
        *("a.tif", "b.png", "a_overlay.jpg", "b_overlay.jpg", "legend.png")
    }


def test_without_rasterio_the_loss_is_said(tmp_path, monkeypatch):
    path = write(tmp_path / "a.tif", values())
    monkeypatch.setitem(__import__("sys").modules, "rasterio", None)
    with pytest.warns(UserWarning, match=r'pip install "linvit\[geo\]"; it is lost'):
        assert georeference(path) is None
