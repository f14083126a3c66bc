"""Kernels of linear attention for a GPU, written in Triton.

A mechanism, a plug-in's too, whose `forward(q, k, v, grid)` computes what a `Formula` describes, uses them by

    @with_kernel
    @linvit.recomputed
    @linvit.full_precision
    def forward(self, q, k, v, grid): ...          # the same by torch: on a CPU, for export, in float64

    def formula(self, q, k, grid):                 # None where its options have no kernel
        return Formula("relu", eps=self.eps)

and `linear_attention(q, k, v, formula)` calls them directly.
"""

from linvit.attention.kernels.choice import with_kernel
from linvit.attention.kernels.formula import Formula, linear_attention

__all__ = ["Formula", "linear_attention", "with_kernel"]
