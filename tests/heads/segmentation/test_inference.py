"""The class of each pixel: golden files, the plain computation at full size, and the memory that it takes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from linvit import UserError
from linvit.experiments.measure import peak_memory
from linvit.heads.segmentation import inference
from linvit.heads.segmentation.inference import bands, starts
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import randn

MODES = {"whole": {}, "slide": {"window": (13, 16), "stride": (7, 11)}}


class Toy(nn.Module):
    """The network of the golden files: logits at a quarter of the side."""

    def __init__(self, golden: Golden | None = None, classes: int = 4):
        super().__init__()
        self.conv, self.conv2 = nn.Conv2d(3, 6, 4, 4), nn.Conv2d(6, 6, 3, padding=1)
        self.classifier = nn.Conv2d(6, classes, 1)
        if golden is not None:
            names = {"backbone.": "", "decode_head.conv_seg": "classifier"}
            state = golden.parameters()
            for old, new in names.items():
                state = {name.replace(old, new): tensor for name, tensor in state.items()}
            self.load_state_dict(state)

    def forward(self, images):
        return self.classifier(self.conv2(self.conv(images).tanh()).tanh())


@torch.no_grad()
def segment(network, views, size, window=None, stride=None):
    """The class of each pixel (H, W)."""
    return torch.cat([band.argmax(1)[0] for band in bands(network, views, size, window, stride)])


@pytest.fixture(autouse=True, params=[1, 10**9], ids=["row by row", "at once"])
def band_bytes(request, monkeypatch):
    monkeypatch.setattr(inference, "BAND_BYTES", request.param)


@of_case("seg_inference")
@both_precisions
def test_equals_mmsegmentation(golden, dtype):
    options = golden.constructor["test_cfg"]
    network = Toy(golden).to(dtype)
    images = [golden.tensors[name].to(dtype) for name in sorted(golden.named("input"))]
    views = [*zip(images, options.get("flips", [False]), strict=True)]
    size = golden.constructor["ori_shape"]
    probabilities = torch.cat(list(bands(network, views, size, options.get("crop_size"), options.get("stride"))), 2)
    golden.check("output.probabilities", probabilities)
    (probabilities * golden.tensors["probe.probabilities"].to(dtype)).sum().backward()
    for name in golden.named("grad_param."):
        ours = name.removeprefix("grad_param.").replace("backbone.", "").replace("decode_head.conv_seg", "classifier")
        golden.check(name, network.get_parameter(ours).grad)
    predicted = segment(network, views, size, options.get("crop_size"), options.get("stride"))
    assert torch.equal(predicted, golden.tensors["output.prediction"])


def plain(network, image, window, stride):
    """The logits of an image at its size, by the definition."""
    if window is None:
        return F.interpolate(network(image), image.shape[2:], mode="bilinear")
    total, count = 0, torch.zeros_like(image[:, :1])
    for top in starts(image.shape[2], window[0], stride[0]):
        for left in starts(image.shape[3], window[1], stride[1]):
            place = (slice(None), slice(None), slice(top, top + window[0]), slice(left, left + window[1]))
            logits = F.interpolate(network(image[place]), window, mode="bilinear")
            full = image.new_zeros(1, logits.shape[1], *image.shape[2:])
            full[place] = logits
            total = total + full
            count[place] += 1
    return total / count


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("side", "size"), [((41, 29), (97, 31)), ((13, 50), (9, 70))], ids=str)
def test_bands_are_the_rows_of_the_plain_computation(mode, side, size):
    network, image = Toy(classes=5).double(), randn(1, 3, *side)
    options = MODES[mode]
    want = plain(network, image, options.get("window"), options.get("stride"))
    want = F.interpolate(want, size, mode="bilinear").softmax(1)
    got = torch.cat(list(bands(network, [(image, False)], size, **options)), 2)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    assert torch.equal(segment(network, [(image, False)], size, **options), want.argmax(1)[0])


def test_the_mean_of_a_mirrored_copy_is_symmetric():
    """With both views an image that is its own mirror image has a symmetric prediction."""
    network, half = Toy().double(), randn(1, 3, 24, 16)
    image = torch.cat([half, half.flip(-1)], -1)
    (found,) = [torch.cat(list(bands(network, [(image, False), (image.flip(-1), True)], (24, 32))), 2)]
    torch.testing.assert_close(found, found.flip(-1))
    torch.testing.assert_close(found.sum(1), torch.ones(1, 24, 32, dtype=torch.float64))


def test_a_small_image_is_one_window():
    network, image = Toy().double(), randn(1, 3, 12, 20)
    got = segment(network, [(image, False)], (12, 20), window=(64, 64), stride=(40, 40))
    assert torch.equal(got, segment(network, [(image, False)], (12, 20)))


@pytest.mark.parametrize("stride", [0, 17])
def test_windows_leave_no_pixel_out(stride):
    with pytest.raises(UserError, match=rf"the stride of windows of 16 pixels must be between 1 and 16; got {stride}"):
        segment(Toy(), [(torch.zeros(1, 3, 32, 32), False)], (32, 32), window=(16, 16), stride=(stride, 8))


def test_full_size_logits_exist_for_a_band_only(band_bytes, monkeypatch):
    """Of 40 classes and 300 x 400 pixels, 19 MB in float32, at most two bands of 1 MB exist at once."""
    monkeypatch.setattr(inference, "BAND_BYTES", 2**20)
    sizes = []
    for scores in bands(Toy(classes=40), [(torch.zeros(1, 3, 300, 400), False)], (300, 400)):
        sizes.append(scores.numel() * scores.element_size())
    assert max(sizes) <= 2**20
    assert sum(sizes) == 40 * 300 * 400 * 4


def test_windows_are_kept_as_small_as_the_network_makes_them(monkeypatch):
    """Logits of 40 classes for a row of windows, 128 x 300 pixels, would be 6 MB."""
    monkeypatch.setattr(inference, "BAND_BYTES", 2**18)
    network, views = Toy(classes=40), [(torch.zeros(1, 3, 150, 300), False)]

    def work():
        segment(network, views, (150, 300), window=(128, 128), stride=(86, 86))

    work()
    assert peak_memory(work) < 40 * 128 * 300 * 4
