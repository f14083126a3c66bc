"""Decoding against PIL."""

import io
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from linvit.data.transforms.decode import decode
from tests.data.images import picture


@pytest.fixture(params=["PIL", "torchvision"])
def decoder(request, monkeypatch):
    """Either of the decoders of JPEG: torchvision's if it has one."""
    if request.param == "PIL":
        monkeypatch.setattr(torch.ops, "image", SimpleNamespace())


def stored(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def by_pil(data):
    """What PIL makes of a file."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}], ids=str)
def test_jpeg_is_what_pil_decodes(decoder, mode, options):
    image = Image.new("RGB", (67, 45))
    image.paste(picture(1, 60, 40).resize((67, 45)))
    data = stored(image.convert(mode), quality=90, **options)
    found, expected = decode(data), by_pil(data)
    assert found.dtype == torch.uint8
    # both use libjpeg-turbo; CMYK becomes RGB by a product that each rounds its own way
    assert (found.int() - expected.int()).abs().max() <= (1 if mode == "CMYK" else 0)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_camera_s_orientation_is_followed_unless_it_is_not_wanted(decoder, orientation, kind):
    data = stored(picture(0, 24, 16), kind, exif=turned(orientation))
    assert torch.equal(decode(data), by_pil(data))
    assert decode(data).shape == ((3, 16, 24) if orientation < 5 else (3, 24, 16))
    as_stored = torch.from_numpy(np.array(Image.open(io.BytesIO(data)))).permute(2, 0, 1)
    assert torch.equal(decode(data, exif_orientation=False), as_stored)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "TIFF", "WEBP"])
def test_other_files_go_through_pil(kind):
    data = stored(picture(0), kind)
    assert torch.equal(decode(data), by_pil(data))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.95])
def test_a_part_of_a_file_is_an_os_error(decoder, kind, keep):
    data = stored(picture(0, 60, 40), kind)
    with pytest.raises(OSError, match=r"\w"):
        decode(data[: int(keep * len(data))])


def test_no_image_is_an_os_error():
    with pytest.raises(OSError, match="not an image of the formats JPEG, PNG"):
        decode(b"some text")


def test_nobody_is_warned_of_torchvision_s_decoder():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(stored(picture(0))).shape == (3, 10, 12)
