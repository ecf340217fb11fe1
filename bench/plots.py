"""Curves as SVG files that are equal when the numbers are."""

from pathlib import Path

import matplotlib as mpl

from bench.results import Curve


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
        axes.set_xscale("log")
        if curve.log == "xy":
            axes.set_yscale("log")
        else:
            highest = max(y for series in curve.series for _, y in series.points)
            axes.set_ylim(0, 1.1 * highest)
        axes.set(xlabel=curve.x_label, ylabel=curve.y_label, title=curve.title)
        if len(curve.series) > 1:
            figure.legend(loc="outside right center", frameon=False)  # never over the lines
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    return path
