"""Image files: which can be used, which odd ones can too, and what is said of those that cannot."""

import io
import os
import socket
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from linvit.data.sources.read import BadImageError, ImageReader, name_of
from linvit.data.transforms.decode import FORMATS, Bands, decode
from tests.data import png
from tests.data.damaged import bomb, damaged, encoded, photo
from tests.data.tiff import tiff


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


@pytest.fixture(scope="module")
def expected(root):
    return damaged(root)


def reason(stored, **options):
    with pytest.raises(BadImageError) as error:
        ImageReader(**options).read(stored, "x")
    return error.value.reason


def bare_tiff(side, bands, tags):
    """A TIFF of 16 bits without pixels."""
    return tiff({256: side, 257: side, 258: [16] * bands, 259: 1, 262: 1, 277: bands, 284: 1} | tags)


def test_every_image_is_good_or_bad_as_it_should_be(root, expected):
    for path, wrong in expected.items():
        stored = {"bytes": None, "path": str(root / path)}
        if wrong is None:
            assert ImageReader().read(stored, path).shape[0] == 3
        else:
            assert wrong in reason(stored)


@pytest.mark.parametrize(
    "name", ["palette.png", "alpha.png", "animated.gif", "png_inside.jpg", "cmyk.jpg", "rotated.jpg", "grey.jpg"]
)
def test_odd_images_are_what_pil_makes_of_them(root, expected, name):
    path = root / "train" / "bee" / name
    picture = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    ours = ImageReader().read({"bytes": None, "path": str(path)}, name).permute(1, 2, 0).numpy().astype(int)
    assert ours.shape == np.asarray(picture).shape
    # The decoders of JPEG are the same; rounding in the conversion of CMYK is not.
    assert abs(ours - np.asarray(picture, int)).max() <= (2 if name == "cmyk.jpg" else 0)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("lost", [1, 100, 0.9])
def test_a_truncated_jpeg_is_bad_to_either_decoder(progressive, lost, monkeypatch):
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (60, 70, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "JPEG", quality=90, progressive=progressive)
    whole = buffer.getvalue()
    cut = whole[: -lost if lost >= 1 else int(len(whole) * (1 - lost))]
    assert "runcated" in reason({"bytes": cut, "path": None})
    monkeypatch.setattr(torch.ops, "image", SimpleNamespace())
    assert "runcated" in reason({"bytes": cut, "path": None})


@pytest.mark.parametrize("mode", ["RGBA", "P", "1"])
def test_a_large_image_is_converted_in_strips_to_the_same_pixels(monkeypatch, mode):
    data = encoded(photo(3).convert(mode), "PNG")
    whole = decode(data)
    monkeypatch.setattr("linvit.data.transforms.decode.STRIP", 300)
    strips = decode(data)
    assert torch.equal(strips, whole)
    assert strips.stride() == whole.stride()


class TestSize:
    """Bombs are refused by what their header says, before they are decoded."""

    def test_the_limit_is_an_argument(self):
        data = {"bytes": encoded(photo(0), "JPEG"), "path": None}
        assert ImageReader(48 * 56).read(data, "x").shape == (3, 56, 48)
        assert reason(data, max_pixels=48 * 56 - 1) == "48 x 56 pixels are more than the limit, 2687"

    def test_a_heavy_format_may_have_half_the_pixels(self):
        """PIL takes 18 bytes for a pixel of a WebP file, and 9 for one of most others."""
        stored = {"bytes": encoded(photo(0), "WEBP"), "path": None}
        assert ImageReader(2 * 48 * 56).read(stored, "x").shape == (3, 56, 48)
        assert reason(stored, max_pixels=2 * 48 * 56 - 1) == "48 x 56 pixels are more than the limit for WEBP, 2687"

    def test_a_format_that_is_a_program_is_not_opened(self, monkeypatch):
        def run(*_, **__):
            raise AssertionError("Ghostscript is called")

        monkeypatch.setattr("subprocess.check_call", run)
        eps = encoded(photo(0), "EPS")
        assert Image.open(io.BytesIO(eps)).format == "EPS"
        assert reason({"bytes": eps, "path": "x.jpg"}).startswith("not an image of the formats JPEG, PNG, ")

    def test_every_format_is_one_that_pil_knows(self):
        Image.init()
        assert set(FORMATS) <= set(Image.OPEN)

    def test_bombs(self, monkeypatch):
        monkeypatch.setattr("linvit.data.sources.read.decode", lambda *args: pytest.fail("decoded"))
        with pytest.warns(Image.DecompressionBombWarning):  # up to twice the limit PIL warns, beyond it refuses
            assert "10000 x 10000 pixels are more than" in reason({"bytes": bomb(10_000, 10_000), "path": None})
        assert "200000000 pixels" in reason({"bytes": bomb(20_000, 10_000), "path": None})

    def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded(self, monkeypatch):
        """Each of them takes as long as the image has pixels: 3,000 in 200 kB take minutes."""
        buffer = io.BytesIO()
        photo(0).save(buffer, "JPEG", progressive=True)
        head, *scans = buffer.getvalue()[:-2].split(b"\xff\xda")
        scan = b"\xff\xda" + scans[-1]
        thumbnails = b"\xff\xe1\xff\xff" + 200 * b"\xff\xda" + bytes(0xFFFF - 2 - 400)
        behind = b"\xff\xd9" + 200 * b"\xff\xda"  # the video of a moving photo
        whole = buffer.getvalue()[:2] + thumbnails + buffer.getvalue()[2:] + behind
        assert ImageReader().read({"bytes": whole, "path": None}, "x").shape == (3, 56, 48)
        monkeypatch.setattr("linvit.data.sources.read.decode", lambda *args: pytest.fail("decoded"))
        assert "a JPEG file of 3,000 scans" in reason({"bytes": head + 3000 * scan + b"\xff\xd9", "path": None})

    def test_a_baseline_jpeg_of_very_many_scans_is_refused_too(self, monkeypatch):
        buffer = io.BytesIO()
        photo(0).convert("L").save(buffer, "JPEG")
        head, scan = buffer.getvalue()[:-2].split(b"\xff\xda")
        data = head + 101 * (b"\xff\xda" + scan) + b"\xff\xd9"
        monkeypatch.setattr("linvit.data.sources.read.decode", lambda *args: pytest.fail("decoded"))
        assert "a JPEG file of 101 scans" in reason({"bytes": data, "path": None})
        assert ImageReader().size({"bytes": data, "path": None}) is None

    def test_bands_that_nobody_asks_for_are_not_read(self):
        """A TIFF of a few hundred bytes whose values would take 33 GiB."""
        strips = {278: 1, 273: [0] * 9000, 279: [0] * 9000}  # of a row each; GDAL takes those that are missing for 0
        for tags, bands, said in [
            ({}, tuple(range(1, 201)), "9000 x 9000 pixels of 200 bands of uint16 are 32,400,000,000 bytes, more than"),
            (strips, (3,), "or a block of it with its 200 bands, have more than"),  # all of which are decoded
            ({259: 8, 278: 9000, 273: 0, 279: 0}, (3,), "or a block of it with its 200 bands, have more than"),
            ({322: 60_000, 323: 60_000, 324: 0, 325: 0}, (3,), "tiles of 60000 x 60000 pixels"),
        ]:
            data = bare_tiff(9000, 200, tags or strips)
            assert said in reason({"bytes": data, "path": None}, bands=Bands(bands, ((0, 9000),)))
        small = bare_tiff(90, 200, {278: 1, 273: [0] * 90, 279: [0] * 90})
        limit, stored = 200_000, {"bytes": small, "path": None}  # of pixels, and so of 1.6 MB
        assert ImageReader(limit, bands=Bands((3,), ((0, 9000),))).read(stored, "x").shape == (1, 90, 90)
        assert "3,240,000 bytes" in reason(stored, max_pixels=limit, bands=Bands((*range(1, 201),), ((0, 9000),)))

    def test_text_of_a_png_has_a_limit(self):
        bomb = png.chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**21)))
        for data in (encoded(photo(0), "PNG"), png.of_samples(np.zeros((4, 4, 1)), 2, 0)):
            for place in (png.before_pixels, png.behind_pixels):
                assert "Decompressed data too large" in reason({"bytes": place(data, bomb), "path": None})

    @pytest.mark.parametrize(("width", "height"), [(401, 2), (2, 401)])
    def test_strips(self, width, height):
        said = f"{width} x {height} pixels: one side is more than 200 times the other"
        assert reason({"bytes": encoded(Image.new("RGB", (width, height)), "PNG"), "path": None}) == said
        fits = encoded(Image.new("RGB", (min(width, 400), min(height, 400))), "PNG")
        assert 400 in ImageReader().read({"bytes": fits, "path": None}, "x").shape


class TestFiles:
    """What cannot be read at all."""

    def test_a_folder_a_missing_file_and_one_without_permission(self, tmp_path, monkeypatch):
        assert reason({"bytes": None, "path": str(tmp_path)}) == "Is a directory"
        assert reason({"bytes": None, "path": str(tmp_path / "gone.jpg")}) == "No such file or directory"

        def denied(*args, **options):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("builtins.open", denied)
        assert reason({"bytes": None, "path": __file__}) == "Permission denied"

    @pytest.mark.parametrize("on_hub", [False, True])
    @pytest.mark.parametrize(
        "path", ["http://{}/x.jpg", "reference::http://{}/x", "zip://a.jpg::http://{}/x", "http://{}/x::hf://a"]
    )
    def test_an_address_is_not_asked(self, path, on_hub):
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(0.2)
            address = path.format(f"127.0.0.1:{server.getsockname()[1]}")
            with pytest.raises(OSError, match="an address, which is not fetched: the images of this data source are"):
                ImageReader(on_hub=on_hub).load({"bytes": None, "path": address})
            with pytest.raises(TimeoutError):
                server.accept()

    def test_a_set_of_the_hub_has_its_files_there(self, monkeypatch):
        asked = []
        monkeypatch.setattr("fsspec.open", lambda path, mode: asked.append(path) or io.BytesIO(b"abc"))
        for path in ("hf://datasets/owner/name/x.jpg", "zip://x.jpg::hf://datasets/owner/name/x.zip"):
            assert ImageReader(on_hub=True).load({"bytes": None, "path": path}) == b"abc"
            with pytest.raises(OSError, match="not fetched"):
                ImageReader().load({"bytes": None, "path": path})
        assert asked == ["hf://datasets/owner/name/x.jpg", "zip://x.jpg::hf://datasets/owner/name/x.zip"]

    @pytest.mark.parametrize("nothing", [None, {"bytes": None, "path": None}, {"bytes": None, "path": ""}], ids=str)
    def test_no_image_at_all(self, nothing):
        assert reason(nothing) == "no image: the cell is empty"

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in this file system")
    def test_what_is_no_regular_file_is_not_opened(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.jpg")  # to open it would wait for a writer, for ever
        (tmp_path / "link.jpg").symlink_to("/dev/zero")
        for name in ("pipe.jpg", "link.jpg"):
            assert reason({"bytes": None, "path": str(tmp_path / name)}) == "not a regular file"

    def test_a_file_that_is_larger_than_any_image_is_not_read(self, tmp_path):
        with open(tmp_path / "x.jpg", "wb") as file:
            file.truncate(2**40)
        assert "bytes are more than" in reason({"bytes": None, "path": file.name})


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ({"bytes": None, "path": "a/b.jpg"}, "a/b.jpg"),
        ({"bytes": b"", "path": "image.jpg"}, "row 3 (image.jpg)"),
        ({"bytes": b"", "path": None}, "row 3 (stored in the table)"),
        (None, "row 3 (stored in the table)"),
    ],
)
def test_an_image_is_called_by_what_finds_it(stored, name):
    assert name_of(stored, "row 3") == name
