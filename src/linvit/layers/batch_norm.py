"""A linear layer whose output is batch-normalised: the 1 x 1 convolution with BatchNorm of convolutional networks."""

from torch import Tensor, nn


class BatchNormLinear(nn.Linear):
    """A linear map, then BatchNorm of each channel over all tokens of the batch; (B, N, C) -> (B, N, C').

    On the tokens of a plane it is a 1 x 1 convolution with `BatchNorm2d`. In training the samples of a batch depend on
    each other through it. Under gradient checkpointing the running statistics move twice per step, as all of torch's.

    Args:
        in_features: Channels C.
        out_features: Channels C'.
        bias: A bias before the BatchNorm, on which it has no effect in training.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias)
        self.norm = nn.BatchNorm1d(out_features)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C')."""
        x = super().forward(x)
        return self.norm(x.flatten(0, 1)).view_as(x)  # type: ignore[no-any-return]
