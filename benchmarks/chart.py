"""The chart: a key and a hit by prompt length, both axes logarithmic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contenders import BYPASS, BYTES, LIST_PATH, OURS, OURS_LISTS, TOLIST
from tables import Table

# Colours that differ in print and for the colour-blind (Okabe and Ito); dashes for what is not a key of content.
_COLOURS = {
    LIST_PATH: "#D55E00",
    TOLIST: "#E69F00",
    BYPASS: "#666666",
    BYTES: "#0072B2",
    "numpy + xxhash": "#56B4E9",
    "numpy + sha256": "#CC79A7",
    "numpy + blake3": "#F0E442",
    OURS_LISTS: "#000000",
    OURS: "#009E73",
}
_DASHED = (BYPASS,)


def draw(tables: dict[str, Table], prefix: str) -> list[Path]:
    """Write PREFIX.svg and PREFIX.png; raise ImportError where matplotlib is missing."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "omni-tensor-key"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    _panel(axes[0], tables["key"], "One key")
    _panel(axes[1], tables["hit"], "A wrapped call that hits")
    axes[0].set_ylabel("µs, least of the repeats")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    paths = [Path(f"{prefix}.{suffix}") for suffix in ("svg", "png")]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return paths


def _panel(axes: Any, table: Table, title: str) -> None:
    lengths = [int(column.replace(",", "")) for column in table.columns]
    for name, colour in _COLOURS.items():
        if name in table.rows:
            times = [table.at(name, length) / 1e3 for length in lengths]
            width = 2.5 if name == OURS else 1.5
            axes.plot(
                lengths,
                times,
                label=name,
                color=colour,
                linewidth=width,
                marker="o",
                markersize=3,
                linestyle="--" if name in _DASHED else "-",
            )
    axes.set(title=title, xlabel="tokens in the prompt (IDs and mask, int64, batch 1)", xscale="log", yscale="log")
    axes.set_xticks(lengths, table.columns)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
