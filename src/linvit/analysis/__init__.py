"""Analysis of attention from outside a model: matrix, rank, entropy, operations and inputs of each mechanism."""

from linvit.analysis.attention_matrix import attention_matrix, channel_matrix
from linvit.analysis.attention_statistics import attention_rank, attention_statistics
from linvit.analysis.maps import Query, query_map, rollout
from linvit.analysis.operations import Operations, attention_cost, count_operations, macs, num_parameters
from linvit.analysis.rank import rank
from linvit.analysis.recorder import Call, Recorder

__all__ = [
    "Call",
    "Operations",
    "Query",
    "Recorder",
    "attention_cost",
    "attention_matrix",
    "attention_rank",
    "attention_statistics",
    "channel_matrix",
    "count_operations",
    "macs",
    "num_parameters",
    "query_map",
    "rank",
    "rollout",
]
