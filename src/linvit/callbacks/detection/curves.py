"""Precision over recall as a picture."""

from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SHOWN = {"0.50": slice(1), "0.75": slice(5, 6), "0.50:0.95": slice(None)}  # IoU thresholds among 0.50, 0.55, ..., 0.95


def curves_picture(precision: Mapping[str, np.ndarray]) -> np.ndarray:
    """Draws the mean over classes of the precision, as COCO interpolates it, a panel per kind: (H, W, 3), uint8.

    Args:
        precision: By what must overlap, "box" or "mask": (10, 101, K) of IoU threshold, recall and class; -1 for a
            class without an object.
    """
    with mpl.rc_context({"axes.grid": True, "grid.color": "#e2e2e2", "figure.constrained_layout.use": True}):
        figure = Figure(figsize=(5 * len(precision), 4.2), dpi=100)
        canvas = FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(precision), squeeze=False)[0]
        for axes, (kind, values) in zip(panels, precision.items(), strict=True):
            found = values[..., (values >= 0).all((0, 1))]
            for name, chosen in SHOWN.items():
                if found.shape[-1]:
                    curve = found[chosen].mean((0, 2))
                    axes.plot(np.linspace(0, 1, len(curve)), curve, label=f"IoU {name}: AP {curve.mean():.3f}")
            axes.set(xlabel="recall", ylabel="precision", title=f"{kind}, {found.shape[-1]} classes", ylim=(0, 1.02))
            if axes.lines:
                axes.legend(loc="lower left")
        canvas.draw()  # type: ignore[no-untyped-call]
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]
