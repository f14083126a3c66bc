"""Kernels of linear attention for a GPU, written in Triton.

A mechanism (also of a plug-in) whose `core` is described by a `Formula` uses them by one more method:

    def formula(self, q, k, grid):                 # None where its options have no kernel
        return Formula("relu", eps=self.eps)

and `linear_attention(q, k, v, formula)` calls them directly.
"""

from linvit.attention.kernels.formula import Formula, linear_attention

__all__ = ["Formula", "linear_attention"]
