"""Curves as SVG files that are equal when the numbers are."""

from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.results import Curve

LOG_HEIGHTS_RATIO_MIN: Final = 3  # of the highest to the lowest; below, a level line looks steep


def draw(curve: Curve, folder: Path) -> Path:
    """Write ``<folder>/<name>.svg``."""
    mpl.use("svg")  # no display, no window
    from matplotlib import pyplot as plt  # after the backend is chosen

    path = folder / f"{curve.name}.svg"
    with mpl.rc_context(
        {
            "svg.hashsalt": "sideband",  # ids inside the file do not change from run to run
            "font.size": 9.0,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    ):
        figure, axes = plt.subplots(figsize=(6.0, 3.4), layout="constrained")
        for series in curve.series:
            xs, ys = zip(*series.points, strict=True)
            axes.plot(xs, ys, marker="o", markersize=3.5, linewidth=1.2, label=series.name)
        _scale(axes, curve)
        axes.set(xlabel=curve.x_label, ylabel=curve.y_label, title=curve.title)
        if len(curve.series) > 1:
            figure.legend(loc="outside right center", frameon=False)  # never over the lines
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    return path


def has_log_heights(curve: Curve) -> bool:
    """Whether the heights get a logarithmic axis; else one from zero."""
    heights = [y for series in curve.series for _, y in series.points]
    return curve.log == "xy" and max(heights) >= LOG_HEIGHTS_RATIO_MIN * min(heights)


def _scale(axes: Axes, curve: Curve) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    if not has_log_heights(curve):
        axes.set_ylim(0, 1.1 * max(y for series in curve.series for _, y in series.points))
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _plain(value: float, _at: object) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
