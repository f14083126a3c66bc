"""Looking at a mechanism from outside: its equivalent matrix, rank, effective rank, entropy."""

from linvit.analysis.attention_matrix import attention_matrix
from linvit.analysis.attention_rank import attention_rank
from linvit.analysis.rank import effective_rank, entropy, rank

__all__ = ["attention_matrix", "attention_rank", "effective_rank", "entropy", "rank"]
