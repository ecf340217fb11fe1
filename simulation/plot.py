"""The plot: bytes inline against by handle, as SVG."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot

from simulation.tables import Cost, size


def write_plot(costs: Sequence[Cost], path: Path) -> None:
    """Horizontal bars on a logarithmic axis, one pair per quantity and model."""
    shown = [cost for cost in costs if "memory" not in cost.what]
    names = [f"{cost.what}\n{cost.model}" for cost in shown]
    places = range(len(shown))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sideband"}):
        figure, axes = pyplot.subplots(figsize=(9, 0.62 * len(shown) + 1.6))
        for offset, label, colour, values in (
            (-0.2, "inline", "#b0413e", [cost.inline_bytes for cost in shown]),
            (0.2, "by handle", "#2f6f8f", [cost.handle_bytes for cost in shown]),
        ):
            heights = [place + offset for place in places]
            bars = axes.barh(heights, values, height=0.38, label=label, color=colour)
            axes.bar_label(bars, [size(value) for value in values], padding=3, fontsize=8)
        axes.set_yticks(list(places), names, fontsize=8)
        axes.set_xscale("log")
        axes.set_xlabel("bytes (log)")
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
        axes.set_title("The same rollouts, inline and by handle", loc="left")
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)
