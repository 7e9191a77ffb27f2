"""Draws records/headline.png, the picture at the head of the README: loss over training time, ours
beside the code of two records of the NanoGPT speedrun.

    python -m records.headline

All runs: four H200, the same training and validation tokens of the stand-in corpus, torch 2.11.0
with CUDA 13.0. Our curve is read from a log of this folder. The points of the others we measured
ourselves, by running their own code in two sittings on two hosts of this kind. Record 89 ran with
FlashAttention 2 in place of 3, which could not be had there, and with the lengths of its stages
scaled to fewer steps. Our log is of a third host; at the second sitting our code of the same
mathematics took 26.75, 26.92 and 26.92 s for 3.4833, 3.4837 and 3.4822.
"""
from . import plots
from .log import read_log
from .record import RECORDS

OURS = RECORDS / "2026-11-22_house_four_gpus" / "log_1.txt"
TARGET = 3.492  # validation loss, nats per token

# Seconds of training and validation loss, 10,485,760 tokens.
RECORD_28_FIRST_SITTING = [(22.1, 4.0273), (44.2, 3.6910), (66.3, 3.4921)]  # 2026-11-21
RECORD_28_SECOND_SITTING = [(0.0, 10.8258), (21.5, 4.0216), (66.8, 3.4925)]  # 2026-11-22
# Each point is the end of a run of its own.
RECORD_89 = [
    (31.0, 3.5623),  # 270 steps
    (39.3, 3.4755),  # 345 steps
    (41.0, 3.4715),  # 345 steps, at the second sitting (the other runs: at the first one)
    (58.2, 3.3622),  # 515 steps
]

RED = "#b5432a"
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
LABEL = {"fontsize": 9, "verticalalignment": "center", "bbox": WHITE}


def draw(path):
    """Draws the picture and writes it to this path."""
    fig, (ax,) = plots.figure(1, 7.2, 3.9)

    log = read_log(OURS)
    steps, means = plots.training(log)
    seconds = [step.time_ms / 1000 for step in steps]
    ends = len(means) // 100  # at both ends a mean is of few losses, so these are left out
    ax.plot(seconds[ends:-ends], means[ends:-ends], color=plots.RUN, lw=1.2)
    last = log.validations[-1]
    finish = last.time_ms / 1000
    ax.plot([finish], [last.loss], "o", color=plots.RUN, ms=7)
    text = (f"ours: {last.loss:.4f} after {finish:.1f} s\n"
            "line: training loss, smoothed; point: validation")
    ax.text(7.6, 4.36, text, color=plots.RUN, **LABEL)

    ax.plot(*zip(*RECORD_28_FIRST_SITTING), "s:", color=plots.MUTED, lw=0.8, ms=5, mfc="white")
    ax.plot(*zip(*RECORD_28_SECOND_SITTING), "s", color=plots.INK, ms=5)
    text = ("record 28's own code: 3.4925 after 66.8 s\n"
            "validations of two runs (filled, hollow)")
    ax.text(29, 4.02, text, color=plots.INK, **LABEL)
    ax.plot(*zip(*RECORD_89), "D", color=RED, ms=5)
    text = ("record 89's own code: 3.4715 after 41.0 s\n"
            "validations at the ends of four runs")
    ax.text(56.5, 3.32, text, color=RED, horizontalalignment="right", **LABEL)

    ax.axhline(TARGET, color=plots.INK, lw=0.8, ls=plots.DASHED, zorder=0)
    ax.text(0.4, TARGET - 0.05, f"target {TARGET}", color=plots.INK, **LABEL)
    ax.set_xlabel("training time on four H200 (s)")
    ax.set_xlim(0, 70)
    ax.set_ylabel("loss (nats per token)")
    ax.set_ylim(3.25, 4.6)
    plots.save(fig, path)


if __name__ == "__main__":
    draw(RECORDS / "headline.png")
