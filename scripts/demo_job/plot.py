"""loss.png: the loss over the steps with each kill and each return marked, on top of the undisturbed run's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from scripts.demo_job.report import LOSS_TOLERANCE, Report

_LOSS, _REFERENCE, _KILL, _REJOIN = "#1f4e9c", "#f2b134", "#c8322b", "#2e8b57"


def plot(report: Report, path: Path) -> None:
    heights = [5, 1.3] if report.difference is None else [5, 1.3, 1.5]
    figure, all_axes = pyplot.subplots(
        len(heights), 1, figsize=(11, 7.2), sharex=True, height_ratios=heights, layout="constrained", squeeze=False
    )
    loss, strength, *difference = all_axes[:, 0]
    _plot_loss(loss, report)
    _plot_strength(strength, report)
    for axes in difference:
        _plot_difference(axes, report)
    bottom = all_axes[-1, 0]
    bottom.set_xlabel("step")
    bottom.set_xlim(0, max(1, report.run.asked.steps))
    for axes in all_axes[:, 0]:
        axes.spines[["top", "right"]].set_visible(False)
        for recovery in report.recoveries:
            axes.axvline(recovery.kill.step, color=_KILL, linewidth=0.8, alpha=0.35, zorder=0)
    figure.align_ylabels()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _plot_loss(axes: Axes, report: Report) -> None:
    curve, reference, run = report.curve, report.reference, report.run
    if reference is not None:
        axes.plot(*_points(reference), color=_REFERENCE, linewidth=5, label="undisturbed run", solid_capstyle="round")
    axes.plot(*_points(curve), color=_LOSS, linewidth=1.1, label=f"{run.asked.ranks} ranks, killed at random")
    at_top = axes.get_xaxis_transform()  # x in steps, y in parts of the height
    killed = [recovery.kill.step for recovery in report.recoveries]
    came_back = [rejoin.step for rejoin in report.rejoins]
    marks: dict[str, Any] = {"clip_on": False, "zorder": 5, "markersize": 8, "linestyle": "none", "transform": at_top}
    if killed:
        axes.plot(killed, [1.0] * len(killed), marker="v", color=_KILL, label="SIGKILL", **marks)
    if came_back:
        axes.plot(came_back, [0.94] * len(came_back), marker="^", color=_REJOIN, label="rank is back", **marks)
    axes.set_ylabel("loss (nats per byte)")
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.9), frameon=False)
    axes.set_title(
        f"{len(curve)} steps, {len(killed)} kills: {report.audit.lost} samples lost, "
        f"{report.audit.duplicate} seen twice",
        loc="left",
        pad=14,
    )


def _plot_strength(axes: Axes, report: Report) -> None:
    steps = sorted(report.committed_run.attempts)
    axes.step(
        steps,
        [report.committed_run.strength(report.committed_run.attempts[step][0]) for step in steps],
        where="mid",
        color=_LOSS,
        linewidth=1.1,
    )
    axes.set_ylim(0, report.run.asked.ranks + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.set_ylabel("ranks\nvoting")


def _plot_difference(axes: Axes, report: Report) -> None:
    reference = report.reference or {}
    differences = {step: abs(loss - reference[step]) for step, loss in report.curve.items() if step in reference}
    axes.plot(*_points(differences), ".", color=_LOSS, markersize=2.5)
    axes.axhline(LOSS_TOLERANCE, color=_KILL, linewidth=1, linestyle="--")
    axes.text(
        1.0, LOSS_TOLERANCE, "tolerance ", color=_KILL, ha="right", va="bottom", transform=axes.get_yaxis_transform()
    )
    axes.set_yscale("log")
    axes.set_ylim(1e-8, LOSS_TOLERANCE * 10)
    axes.set_ylabel("difference\nin loss")


def _points(curve: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(curve.keys()), list(curve.values())
