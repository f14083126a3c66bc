"""Images of other bands or more bits than 8-bit RGB: what is read of them, and what is refused instead of degraded."""

from functools import partial

import numpy as np
import pytest
import rasterio
import torch
from PIL import Image

from linvit.data.sources.read import BadImageError, ImageReader
from linvit.data.transforms.decode import Bands, kind_of, open_image
from linvit.data.transforms.geometry import Warp, affine_matrix, pad, resize
from linvit.errors import UserError
from tests.data.damaged import encoded
from tests.rasters import values, write

FOUR = Bands((1, 2, 3, 4), ((0, 9000),))


@pytest.fixture
def file(tmp_path):
    return lambda array, **options: stored(write(tmp_path / "x.tif", array, **options))


def stored(path):
    return {"bytes": path.read_bytes(), "path": None}


def png16():
    with rasterio.MemoryFile() as file:
        with file.open(driver="PNG", count=3, height=24, width=32, dtype="uint16") as opened:
            opened.write(values(bands=3))
        return file.read()


def refused(given, **options):
    with pytest.raises(BadImageError) as caught:
        ImageReader(**options).read(given, "x")
    return caught.value.reason


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("uint16", {}),
        ("int16", {"interleave": "band"}),
        ("float32", {"compress": "deflate", "BIGTIFF": "YES"}),
        ("uint8", {}),
    ],
    ids=str,
)
def test_chosen_bands_keep_all_of_their_values(file, dtype, options):
    array = values(dtype=dtype)
    high = 255 if dtype == "uint8" else 9000
    found = ImageReader(bands=Bands((4, 1), ((0, high),))).read(file(array, **options), "x")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.numpy(), array[[3, 0]].astype(np.float32) * np.float32(255 / high))


def test_each_band_has_its_range_and_what_lies_beyond_is_clipped(file):
    array = np.stack([np.full((8, 9), value, np.float32) for value in (-9999, 100, 300, np.nan)])
    found = ImageReader(bands=Bands((1, 2, 3, 4), ((0, 1), (0, 200), (100, 200), (0, 1)))).read(file(array), "x")
    assert found[:, 0, 0].tolist() == [0, 127.5, 255, 0]


def test_bands_of_8_bits_stay_8_bits(file):
    array = values(dtype="uint8")
    assert torch.equal(ImageReader(bands=Bands((3, 4))).read(file(array), "x"), torch.from_numpy(array[2:]))
    grey = {"bytes": encoded(Image.fromarray(array[0]), "PNG"), "path": None}
    assert torch.equal(ImageReader(bands=Bands((1,))).read(grey, "x"), torch.from_numpy(array[:1]))


def test_grey_of_16_bits_needs_no_rasterio(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rasterio", None)
    array = values(bands=1)[0]
    for kind in ("PNG", "TIFF"):
        given = {"bytes": encoded(Image.fromarray(array), kind), "path": None}
        found = ImageReader(bands=Bands(None, ((0, 9000),))).read(given, "x")
        torch.testing.assert_close(found.numpy(), np.stack([array * np.float32(255 / 9000)] * 3))


def test_png_of_16_bits(tmp_path):
    found = ImageReader(bands=Bands(None, ((0, 9000),))).read({"bytes": png16(), "path": None}, "x")
    torch.testing.assert_close(found.numpy(), values(bands=3) * np.float32(255 / 9000))


class TestRefused:
    """No image of more than 8 bits or of other bands is taken as RGB."""

    @pytest.mark.parametrize(
        ("bands", "dtype", "said"),
        [
            (4, "uint16", "it has 4 bands of uint16, and without --data.bands images have three"),
            (2, "uint8", "it has 2 bands of uint8, and without --data.bands"),
            (1, "uint16", "it has 1 band of uint16, and no file says which of its values are black and white"),
            (1, "float32", "it has 1 band of float32, and no file says"),
            (1, "int8", "it has 1 band of int8, and no file says"),
        ],
    )
    def test_tiff(self, file, bands, dtype, said):
        assert said in refused(file(values(bands=bands).clip(0, 100).astype(dtype)))

    @pytest.mark.parametrize(
        "data",
        [
            png16(),
            b"P6 32 24 9000\n" + bytes(2 * 3 * 32 * 24),
            b"P5 32 24 9000\n" + bytes(2 * 32 * 24),
            encoded(Image.fromarray(values(bands=1)[0]), "JPEG2000"),
        ],
        ids=["png", "ppm", "pgm", "jpeg 2000"],
    )
    def test_other_formats(self, data):
        assert "of uint16, and no file says" in refused({"bytes": data, "path": None})

    def test_avif_of_10_bits(self):
        """Pillow writes none, and gives 8 bits of them; the header says it."""
        data = encoded(Image.new("RGB", (32, 24)), "AVIF")
        with open_image(data) as opened:
            assert kind_of(opened, data).plain
            at = data.find(b"av1C") + 6
            assert kind_of(opened, data[:at] + bytes([data[at] | 0x40]) + data[at + 1 :]).dtype == "uint16"

    def test_a_band_that_is_not_there(self, file):
        assert "it has 2 bands of uint8; there is no band 4" in refused(
            file(values(bands=2, dtype="uint8")), bands=Bands((4,))
        )

    def test_a_range_of_16_bits_for_8(self, file):
        assert "whose values end at 255" in refused(file(values(dtype="uint8")), bands=FOUR)

    def test_without_rasterio(self, file, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "rasterio", None)
        with pytest.raises(UserError, match=r'needs rasterio: pip install "linvit\[geo\]"'):
            ImageReader(bands=FOUR).read(file(values()), "x")

    @pytest.mark.parametrize(
        ("bands", "value_range"),
        [
            *[([], None), ([0], None), (None, [1, 0]), ([1], [[0, 1], [0, 1]]), (None, [[1]])],
            *[(None, [low, high]) for low, high in [(-3e38, 3e38), (0, float("inf")), (0, 1e-40), (float("nan"), 1)]],
        ],
    )
    def test_options(self, bands, value_range):
        with pytest.raises(UserError, match=r"^(bands|value_range) "):
            Bands.parse(bands, value_range)


@pytest.mark.parametrize("nothing", [np.nan, np.inf, -np.inf])
def test_an_image_without_a_number_is_bad(file, nothing):
    array = np.full((4, 8, 9), nothing, np.float32)
    assert "all of its values are NaN" in refused(file(array), bands=Bands((1, 2), ((0, 1),)))
    array[1, 0, 0] = 1
    found = ImageReader(bands=Bands((1, 2), ((0, 1),))).read(file(array), "x")
    assert found[1, 0, 0] == 255


def test_geometry_moves_all_bands_alike(file):
    """A band of floats among 5 is moved as one of 8 bits in RGB is, but for the rounding."""
    plane = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (20, 30), dtype=np.uint8))
    turn = Warp(affine_matrix(10, 1.1, (2, 1), (20, 30)), False, (7,))
    larger, padded = partial(resize, size=(31, 17)), partial(pad, right=3, bottom=4)
    for op in (padded, larger, turn):
        expected = op(plane.expand(3, -1, -1).contiguous())[0]
        found = op(plane.float().expand(5, -1, -1).contiguous())
        assert found.shape == (5, *expected.shape)
        # bicubic values beyond black and white are clipped in 8 bits alone, pass by pass
        assert (found.clamp(0, 255) - expected).abs().max() <= (12 if op is larger else 1)
