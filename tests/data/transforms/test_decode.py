"""Decoding against PIL."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from linvit.data.transforms.decode import decode, header
from tests.data import png
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


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "TIFF", "WEBP"])
def test_other_files_go_through_pil(kind):
    data = stored(picture(0), kind)
    assert torch.equal(decode(data), by_pil(data))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("keep", [0.01, 0.95])
def test_a_part_of_a_file_is_an_os_error(decoder, kind, keep):
    data = stored(picture(0, 60, 40), kind)
    with pytest.raises(OSError, match=r"\w"):
        decode(data[: int(keep * len(data))])


RAMP = np.tile(np.arange(0, 256, 17, dtype=np.uint8), (4, 1))  # alpha (4, 16), from transparent to opaque
CLEAR = np.where(RAMP > 100, 255, 0).astype(np.uint8)
COLOUR = np.broadcast_to(np.array([10, 0, 40], np.uint8), (4, 16, 3))


def on_white(colour, alpha):
    """What a viewer shows (3, H, W) of colours (H, W, 3 or 1) under alpha (H, W), by the formula of "over"."""
    share = alpha[..., None] / 255
    return torch.from_numpy(np.broadcast_to(colour * share + 255 * (1 - share), (*alpha.shape, 3))).permute(2, 0, 1)


def colours_of_palette(transparency):
    image = Image.fromarray(np.tile(np.arange(16, dtype=np.uint8), (4, 1)), "P")
    image.putpalette([10, 0, 40] * 256)
    return stored(image, "PNG", transparency=transparency)


def keyed(samples, bits, colour, key):
    """A PNG in which the samples of one value are transparent."""
    return png.of_samples(samples, bits, colour, png.chunk(b"tRNS", np.array(key, ">u2").tobytes()))


GREY = np.tile(np.arange(4), (4, 4))
TRANSPARENT = {
    **{
        f"{kind} {mode}": (stored(Image.fromarray(np.dstack([COLOUR, RAMP])), kind, **options), on_white(COLOUR, RAMP))
        for kind, mode, options in [
            ("PNG", "RGBA", {}),
            ("WEBP", "RGBA", {"lossless": True, "exact": True}),
            ("AVIF", "RGBA", {"quality": 100}),
        ]
    },
    "PNG LA": (stored(Image.fromarray(np.dstack([RAMP // 5, RAMP])), "PNG"), on_white(RAMP[..., None] // 5, RAMP)),
    "PNG palette": (colours_of_palette(bytes(range(0, 256, 17))), on_white(COLOUR, RAMP)),
    "PNG one of a palette": (
        colours_of_palette(3),
        on_white(COLOUR, np.where(np.arange(16) == 3, 0, 255) * np.ones((4, 1))),
    ),
    **{
        f"PNG grey of {bits} bits, keyed": (
            keyed(GREY[..., None] % 2**bits, bits, 0, [1]),
            on_white(GREY[..., None] % 2**bits * (255 // (2**bits - 1)), np.where(GREY % 2**bits == 1, 0, 255)),
        )
        for bits in (1, 2, 4, 8)
    },
    "PNG RGB, keyed": (
        keyed(np.dstack([GREY, GREY, GREY * 2]), 8, 2, [3, 3, 6]),
        on_white(np.dstack([GREY, GREY, GREY * 2]), np.where(GREY == 3, 0, 255)),
    ),
    "GIF": (
        stored(Image.fromarray(CLEAR // 255, "P"), "GIF", transparency=0, optimize=False),
        on_white(np.zeros((4, 16, 1)) + 1, CLEAR),
    ),
}


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_what_is_transparent_is_white(monkeypatch, kind):
    data, expected = TRANSPARENT[kind]
    found = decode(data)
    assert header(data).transparent
    assert (found - expected).abs().max() <= (6 if kind.startswith("AVIF") else 1)
    monkeypatch.setattr("linvit.data.transforms.decode.STRIP", 20)  # in strips
    assert torch.equal(decode(data), found)


@pytest.mark.parametrize(("samples", "colour", "bands"), [(4, 6, 4), (2, 4, 2)])
def test_a_transparent_png_of_16_bits_has_a_band_more(samples, colour, bands):
    """So it is refused until --data.bands says which are used, as a TIFF is: Pillow would cut it to 8 bits."""
    kind = header(png.of_samples(np.full((4, 5, samples), 900), 16, colour))
    assert (kind.bands, kind.dtype, kind.plain) == (bands, "uint16", False)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_a_tiff_with_a_band_more_is_not_guessed_to_be_transparent(mode):
    kind = header(stored(picture(0).convert(mode), "TIFF"))
    assert (kind.bands, kind.plain) == (len(mode), False)
