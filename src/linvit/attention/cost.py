"""What a mechanism costs, counted by itself: torch's counter sees nothing of Hydra, cdist or pinv."""

from typing import NamedTuple


class Cost(NamedTuple):
    """Analytic cost of one forward pass of a mechanism on one image, all heads, without the host's projections.

    Attributes:
        matmul: Multiply-accumulates (MACs) in matrix products and convolutions; FLOPs are twice that. This part equals
            what `torch.utils.flop_counter.FlopCounterMode` counts, halved.
        elementwise: Additions, multiplications, divisions, comparisons and sums on single elements.
        transcendental: exp, log, sqrt, pow, tanh and the like.
        parameters: Learnable parameters of the mechanism.
    """

    matmul: int
    elementwise: int
    transcendental: int
    parameters: int

    @property
    def total(self) -> int:
        """All operations, a MAC counted once."""
        return self.matmul + self.elementwise + self.transcendental
