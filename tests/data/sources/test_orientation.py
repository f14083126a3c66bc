"""The orientation of an image, wherever its file says it: one reader for the header, the pixels and the mask."""

import io
import zlib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, PngImagePlugin, TiffImagePlugin

from linvit.data import SegmentationData
from linvit.data.sources.masks import MaskReader
from linvit.data.sources.read import ImageReader
from linvit.inference.preprocessing import Preprocessing
from tests.data.png import before_pixels, behind_pixels, chunk

HEIGHT, WIDTH = 6, 10
MASK = np.zeros((HEIGHT, WIDTH), np.uint8)
MASK[:2, :3] = 1
XMP = '<x:xmpmeta><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>'
FLIPS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.T,
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].T,
    8: np.rot90,
}


def exif(tag, raw=False):
    entry = Image.Exif()
    entry[274] = tag
    return entry.tobytes()[6:] if raw else entry.tobytes()


def plain(kind, **options):
    buffer = io.BytesIO()
    Image.fromarray(MASK * 255).convert("RGB").save(buffer, kind, **options)
    return buffer.getvalue()


def profile(tag):
    """What ImageMagick writes into a text."""
    data = exif(tag)
    return f"\nexif\n{len(data):8}\n{data.hex()}\n".encode()


def text(tag, kind):
    key, value = b"Raw profile type exif\0", profile(tag)
    middle = {b"tEXt": b"", b"zTXt": b"\0", b"iTXt": b"\0\0\0\0"}[kind]
    return chunk(kind, key + middle + (zlib.compress(value) if kind == b"zTXt" else value))


def xmp_text(tag):
    return chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.format(tag).encode())


def tiff(tag, **options):
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[274] = tag
    return plain("TIFF", tiffinfo=tags, **options)


def tiff_xmp(tag):
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags.tagtype[700] = 1
    tags[700] = XMP.format(tag).encode()
    return plain("TIFF", tiffinfo=tags)


def png(tag, made, place):
    return place(plain("PNG"), made(tag))


LOSSLESS = {
    "PNG eXIf": lambda tag: plain("PNG", exif=exif(tag)),
    "PNG eXIf behind the pixels": lambda tag: behind_pixels(plain("PNG"), chunk(b"eXIf", exif(tag, raw=True))),
    "TIFF": tiff,
    "TIFF LZW": partial(tiff, compression="tiff_lzw"),
    "TIFF XMP": tiff_xmp,
    "PNG XMP": partial(png, made=xmp_text, place=before_pixels),
    "PNG XMP behind": partial(png, made=xmp_text, place=behind_pixels),
} | {
    f"PNG {kind.decode()} {place.__name__}": partial(png, made=partial(text, kind=kind), place=place)
    for kind in (b"tEXt", b"zTXt", b"iTXt")
    for place in (before_pixels, behind_pixels)
}
LOSSY = {
    "JPEG": lambda tag: plain("JPEG", exif=exif(tag)),
    "JPEG XMP": lambda tag: plain("JPEG", xmp=XMP.format(tag).encode()),
    "WebP": lambda tag: plain("WEBP", lossless=True, exif=exif(tag)),
    "WebP XMP": lambda tag: plain("WEBP", lossless=True, xmp=XMP.format(tag).encode()),
    "AVIF": lambda tag: plain("AVIF", quality=100, exif=exif(tag)),
}
PLACES = LOSSLESS | LOSSY


@pytest.mark.parametrize("place", PLACES)
def test_header_pixels_mask_and_prediction_agree(place):
    for tag, turned in FLIPS.items():
        agree(PLACES[place](tag), turned(MASK), lossless=place in LOSSLESS)


@pytest.mark.parametrize("place", ["JPEG", "JPEG XMP"])
def test_pil_s_decoder_of_jpeg_turns_as_torchvision_s(monkeypatch, place):
    monkeypatch.setattr(torch.ops, "image", SimpleNamespace())
    for tag, turned in FLIPS.items():
        agree(PLACES[place](tag), turned(MASK), lossless=False)


def agree(data, turned, lossless):
    stored = {"bytes": data, "path": None}
    for followed, expected in ((True, turned), (False, MASK)):
        reader = ImageReader(exif_orientation=followed)
        assert np.array_equal(reader.read(stored, "x")[0].numpy() > 127, expected)
        assert reader.size(stored) == expected.shape
        if lossless:
            assert np.array_equal(MaskReader(2, values=[0, 255], images=reader)(stored, "x").numpy(), expected)
    given = Preprocessing([0.5] * 3, [0.5] * 3).read(Image.open(io.BytesIO(data)), "x")
    assert np.array_equal(given[0].numpy() > 127, turned)


@pytest.mark.parametrize("place", ["JPEG", "PNG eXIf behind the pixels", "TIFF"])
def test_no_orientation_turns_nothing(place):
    for tag in (0, 9, 65535):
        agree(PLACES[place](tag), MASK, lossless=place in LOSSLESS)


@pytest.mark.parametrize("damage", [b"Exif\0\0", b"Exif\0\0no tiff header", exif(6)[:-5], b""])
@pytest.mark.filterwarnings("ignore:.*EXIF")
def test_a_damaged_entry_turns_nothing(damage):
    for data in (plain("JPEG", exif=damage), behind_pixels(plain("PNG"), chunk(b"eXIf", damage[6:]))):
        agree(data, MASK, lossless=False)


def test_a_broken_chunk_behind_the_pixels_is_passed_over():
    entry = chunk(b"eXIf", exif(6, raw=True))
    data = behind_pixels(plain("PNG"), entry[:-1] + bytes([entry[-1] ^ 1]))
    assert ImageReader().size({"bytes": data, "path": None}) == MASK.shape


def test_a_header_decodes_no_pixels(monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda *_: pytest.fail("decoded"), raising=False)
    assert ImageReader().size({"bytes": LOSSLESS["PNG eXIf behind the pixels"](6), "path": None}) == (WIDTH, HEIGHT)


class TestAMaskWithoutTheTagOfItsImage:
    """Sizes agree, so nothing else tells that image and mask may be turned against each other."""

    @pytest.fixture
    def folder(self, tmp_path):
        mask = np.zeros((16, 16), np.uint8)
        mask[:5] = 1
        for split in ("train", "val"):
            for kind in ("images", "masks"):
                (tmp_path / split / kind).mkdir(parents=True)
            for number, tag in enumerate((1, 3, 6)):
                Image.fromarray(mask * 255).save(tmp_path / split / "images" / f"{number}.png", exif=exif(tag))
                Image.fromarray(mask).save(tmp_path / split / "masks" / f"{number}.png")
        return tmp_path

    def data(self, folder, **options):
        return SegmentationData(str(folder), num_classes=2, img_size=16, num_workers=0, **options)

    def test_it_is_warned_of(self, folder, recwarn):
        self.data(folder).setup("fit")
        said = [str(warning.message) for warning in recwarn if "EXIF" in str(warning.message)]
        assert len(said) == 2  # for train and val
        assert "3 train masks" in said[0]
        assert "2 masks have another EXIF orientation than their image" in said[0]
        assert f"{folder}/train/masks/1.png" in said[0]
        assert "--data.exif_orientation=false" in said[0]

    def test_the_way_out_leads_out(self, folder, recwarn):
        self.data(folder, exif_orientation=False).setup("fit")
        assert not [warning for warning in recwarn if "EXIF" in str(warning.message)]

    def test_sizes_can_tell(self, tmp_path, recwarn):
        """A mask as wide as its image is shown was drawn on what viewers show."""
        for kind in ("images", "masks"):
            (tmp_path / kind).mkdir()
        for number in range(12):
            Image.fromarray(MASK * 255).save(tmp_path / f"images/{number}.png", exif=exif(6))
            Image.fromarray(np.rot90(MASK, -1).copy()).save(tmp_path / f"masks/{number}.png")
        self.data(tmp_path).setup("fit")
        assert not [warning for warning in recwarn if "EXIF" in str(warning.message)]
