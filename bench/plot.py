"""Plots of both benchmarks, drawn from the rows in their JSON files."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.results import keep_picture

Row = Mapping[str, Any]

_COLOURS = ("#1b6ca8", "#d1495b", "#edae49", "#66a182", "#8d6a9f")
_OURS = "elasticjob"


def plot_rendezvous(rows: Sequence[Row], path: Path) -> None:
    """Plot wall time and etcd requests per member over the number of members."""
    pyplot = _pyplot()
    figure, (walls, requests) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for colour, backend in zip(_COLOURS, _names(rows, "backend"), strict=False):
        mine = [row for row in rows if row["backend"] == backend]
        style = {"color": colour, "label": backend, "linewidth": 2.5 if backend == _OURS else 1.5}
        _line(walls, mine, "wall_seconds", style)
        if any(row["requests_per_member"] is not None for row in mine):
            _line(requests, mine, "requests_per_member", style)
    sizes = sorted({row["members"] for row in rows})
    for axes, title in ((walls, "seconds until all have ranks"), (requests, "etcd requests each")):
        axes.set(xscale="log", yscale="log", xlabel="members starting at once", title=title)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    _keep(figure, path)
    pyplot.close(figure)


def plot_recovery(rows: Sequence[Row], limit_seconds: float, path: Path) -> None:
    """Plot a bar for each peer and fault; a labelled hollow bar if a gang never recovered.

    Gangs of one size share a subplot, the smallest at the top.
    """
    pyplot = _pyplot()
    gangs = sorted({int(row["gang"]) for row in rows})
    figure, all_axes = pyplot.subplots(
        len(gangs), 1, figsize=(11, 4.5 * len(gangs)), layout="constrained", squeeze=False
    )
    for gang, axes in zip(gangs, all_axes[:, 0], strict=True):
        _plot_gang([row for row in rows if row["gang"] == gang], gang, limit_seconds, axes)
    _keep(figure, path)
    pyplot.close(figure)


def plot_goodput(runs: Sequence[Row], path: Path) -> None:
    """Plot the distinct steps over time: a subplot for each model and interval of faults."""
    pyplot = _pyplot()
    panels = list(dict.fromkeys((run["model"], run["interval"]) for run in runs if run["interval"]))
    figure, all_axes = pyplot.subplots(
        max(1, len(panels)),
        1,
        figsize=(11, 5 * max(1, len(panels))),
        layout="constrained",
        squeeze=False,
    )
    for (model, interval), axes in zip(panels, all_axes[:, 0], strict=False):
        mine = [run for run in runs if run["model"] == model and run["curve"]]
        undisturbed = [run for run in mine if run["interval"] is None]
        disturbed = [run for run in mine if run["interval"] == interval]
        for run, colour in zip(disturbed, itertools.cycle((*_COLOURS, "#444444")), strict=False):
            for at, _ in run["faults"]:
                axes.axvline(at, color="#dddddd", linewidth=1, zorder=0)
            ours = run["system"].startswith(_OURS)
            style = {"color": colour, "label": run["system"], "linewidth": 2.5 if ours else 1.5}
            axes.step(*zip(*run["curve"], strict=True), where="post", **style)
        for run in undisturbed:
            line = {"color": "black", "linestyle": ":", "label": run["system"]}
            axes.step(*zip(*run["curve"], strict=True), where="post", **line)
        title = f"{model} of state, a fault each {interval:g} s (grey)"
        axes.set(xlabel="seconds", ylabel="distinct steps", title=title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    _keep(figure, path)
    pyplot.close(figure)


def _keep(figure: Any, path: Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format="png")
    keep_picture(path, drawn.getvalue())


def _plot_gang(rows: Sequence[Row], gang: int, limit_seconds: float, axes: Any) -> None:
    peers, faults = _names(rows, "peer"), _names(rows, "fault")
    seconds = {(row["peer"], row["fault"]): row["seconds"] for row in rows}
    width = 0.8 / max(1, len(peers))
    for place, (peer, colour) in enumerate(zip(peers, _COLOURS, strict=False)):
        for position, fault in enumerate(faults):
            if (peer, fault) not in seconds:
                continue
            value = seconds[peer, fault]
            height = limit_seconds if value is None else value
            fill = "none" if value is None else colour
            at = position + (place - (len(peers) - 1) / 2) * width
            axes.bar(at, height, width * 0.9, color=fill, edgecolor=colour)
            text = "never" if value is None else f"{value:.1f}"
            axes.text(at, height * 1.05, text, ha="center", va="bottom", fontsize=8)
        axes.bar(0, 0, color=colour, label=peer)
    title = f"gang of {gang}: from the fault to the new world's all-reduce"
    axes.set(yscale="log", ylabel="seconds", title=title)
    axes.set_xticks(range(len(faults)), faults)
    axes.set_ylim(bottom=0.1, top=limit_seconds * 3)
    axes.legend(frameon=False, ncols=len(peers), loc="upper center")


def _line(axes: Any, rows: Sequence[Row], field: str, style: Mapping[str, Any]) -> None:
    known = sorted((row["members"], row[field]) for row in rows if row[field] is not None)
    axes.plot([n for n, _ in known], [value for _, value in known], marker="o", **style)


def _names(rows: Sequence[Row], field: str) -> list[str]:
    """Return the distinct values of a field in order of first appearance."""
    return list(dict.fromkeys(str(row[field]) for row in rows))


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
