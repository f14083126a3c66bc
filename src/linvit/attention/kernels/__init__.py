"""Kernels of linear attention for a GPU, written in Triton.

A mechanism, a plug-in's too, whose `core` computes what a `Formula` describes, uses them by one method more:

    def formula(self, q, k, grid):                 # None where its options have no kernel
        return Formula("relu", eps=self.eps)

and `linear_attention(q, k, v, formula)` calls them directly.
"""

from linvit.attention.kernels.formula import Formula, linear_attention

__all__ = ["Formula", "linear_attention"]
