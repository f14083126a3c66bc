"""The models of FLatten's and SOFT's authors, step by step as their code computes them, to compare speed with.

Plain modules in float32 without linvit. Parameters have the authors' names, so that their golden files load
(`tests/test_benchmarks.py`), and `linvit.load_pretrained` gives ours the same weights. Rates of dropout are 0. Of
FLatten-DeiT no code is published: it is timm's vision transformer around FLatten's attention.
"""

from authors.pvt import FlattenDeiT, FlattenPVT
from authors.soft import SOFT
from authors.swin import FlattenSwin

MODELS = {
    "flatten_swin_tiny": FlattenSwin,
    "flatten_pvt_tiny": FlattenPVT,
    "soft_tiny": SOFT,
    "flatten_deit_tiny": FlattenDeiT,
}
