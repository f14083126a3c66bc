"""A linear layer whose bias costs compiled code nothing."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Linear):
    """`nn.Linear`, (..., C) -> (..., C'), which leaves its bias to the next kernel where torch compiles it for a CPU.

    torch's product with a bias first writes the bias to every token, a pass over memory that inductor keeps. A sum
    behind the product becomes part of what follows: a compiled FLatten-PVT-T takes 0.88 of the time, a step of its
    training 0.94.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C')."""
        compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        if self.bias is None or not compiled or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        return F.linear(x, self.weight) + self.bias
