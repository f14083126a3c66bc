"""Layers that several heads of detection have, with the initial values of mmdetection."""

from torch import nn


def conv(into: int, out: int, kernel: int = 3, std: float = 0.01) -> nn.Conv2d:
    """Builds a convolution that keeps the size, of normal initial weights and biases 0."""
    layer = nn.Conv2d(into, out, kernel, padding=kernel // 2)
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def tower(width: int, convs: int) -> nn.Sequential:
    """Builds convolutions 3 x 3, each with a ReLU."""
    return nn.Sequential(*(nn.Sequential(conv(width, width), nn.ReLU(inplace=True)) for _ in range(convs)))
