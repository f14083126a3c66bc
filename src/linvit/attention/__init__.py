"""Attention mechanisms: one file each, opening with formula, paper and cost.

In the costs, N is the number of queries, M that of keys and values, P and Q those of patches among them (without class
and register tokens), C the channels over all heads, h the heads, d = C / h the channels of a head's values and dk those
of its keys; other symbols are explained by the mechanism. A cost is that of one image and the default options, without
the host's projections. `linvit.analysis.attention_cost` counts it for any options, also for plug-ins.
"""
