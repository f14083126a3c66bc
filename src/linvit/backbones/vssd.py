"""VSSD: MLLA's pyramid with non-causal state space duality in its first three stages and softmax in the last.

Paper: Shi et al. 2024, "VSSD: Vision Mamba with Non-Causal State Space Duality". Projections have no biases, but for
the output of softmax.

Published with `drop_path_rate` 0.1 (micro), 0.2 (tiny), 0.4 (small) and 0.6 (base).
"""

from functools import partial

from linvit.backbones.mlla import MLLA
from linvit.registry import preset

SSD = {"name": "vssd", "expand": 2, "d_state": 64, "groups": 1}
SSD_48 = {**SSD, "d_state": 48}

_vssd = partial(MLLA, attention=(SSD, SSD, SSD, "softmax"), qkv_bias=False, proj_bias=(False, False, False, True))
vssd_micro = preset(_vssd, attention=(SSD_48, SSD_48, SSD_48, "softmax"), embed_dim=48, depths=(2, 2, 8, 4))
vssd_tiny = preset(_vssd)
vssd_small = preset(_vssd, depths=(3, 4, 21, 5))
vssd_base = preset(_vssd, embed_dim=96, depths=(3, 4, 21, 5), num_heads=(3, 6, 12, 24))
