"""Decoding against PIL."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from linvit.data.transforms.decode import decode
from tests.data.images import picture


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
def test_jpeg_is_what_pil_decodes(mode, options):
    image = Image.new("RGB", (67, 45))
    image.paste(picture(1, 60, 40).resize((67, 45)))
    data = stored(image.convert(mode), quality=90, **options)
    found, expected = decode(data), by_pil(data)
    assert found.dtype == torch.uint8
    # both use libjpeg-turbo; CMYK becomes RGB by a product that each rounds its own way
    assert (found.int() - expected.int()).abs().max() <= (1 if mode == "CMYK" else 0)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_camera_s_orientation_is_followed(orientation, kind):
    data = stored(picture(0, 24, 16), kind, exif=turned(orientation))
    assert torch.equal(decode(data), by_pil(data))
    assert decode(data).shape == ((3, 16, 24) if orientation < 5 else (3, 24, 16))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "TIFF", "WEBP"])
def test_other_files_go_through_pil(kind):
    data = stored(picture(0), kind)
    assert torch.equal(decode(data), by_pil(data))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_is_scaled(kind):
    values = np.arange(256, dtype=np.uint16).reshape(16, 16)
    found = decode(stored(Image.fromarray(values * 257), kind))
    assert torch.equal(found, torch.from_numpy(values.astype(np.uint8)).expand(3, 16, 16))


@pytest.mark.parametrize(("dtype", "kind"), [(np.int32, "integers"), (np.float32, "floats")])
def test_32_bits_are_an_os_error_rather_than_a_guess(dtype, kind):
    data = stored(Image.fromarray(np.linspace(0, 1, 64).reshape(8, 8).astype(dtype)), "TIFF")
    with pytest.raises(OSError, match=f"its pixels are 32-bit {kind}, of no agreed range; save it with 8 or 16 bits"):
        decode(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.95])
def test_a_part_of_a_file_is_an_os_error(kind, keep):
    data = stored(picture(0, 60, 40), kind)
    with pytest.raises(OSError, match=r"\w"):
        decode(data[: int(keep * len(data))])


def test_no_image_is_an_os_error():
    with pytest.raises(OSError, match="cannot identify"):
        decode(b"some text")
