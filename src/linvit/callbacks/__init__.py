"""What a run shows of itself while it trains."""

from linvit.callbacks.attention_rank import AttentionRank
from linvit.callbacks.image_grid import ImageGrid
from linvit.callbacks.prediction_writer import PredictionWriter
from linvit.callbacks.throughput import Throughput

__all__ = ["AttentionRank", "ImageGrid", "PredictionWriter", "Throughput"]
