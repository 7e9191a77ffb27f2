"""Draws records/headline.png, the picture at the head of the README: loss over training time, ours
beside the code of two records of the NanoGPT speedrun.

    python -m records.headline

All runs: four H200 of one host, the same training and validation tokens of the stand-in corpus,
torch 2.11.0 with CUDA 13.0. Our curve is read from a log of this folder. The points of the others
we measured ourselves, by running their own code in two sittings on two hosts of this kind. Record
89 ran with FlashAttention 2 in place of 3, which could not be had there, and with the lengths of
its stages scaled to fewer steps. Our log is of a third host; at the second sitting our code of the
same mathematics took 26.75, 26.92 and 26.92 s for 3.4833, 3.4837 and 3.4822.
"""
from pathlib import Path

from . import plots
from .log import read_log

HERE = Path(__file__).parent
OURS = HERE / "2026-11-22_house_four_gpus" / "log_1.txt"
TARGET = 3.492  # validation loss, nats per token

# Seconds of training and validation loss, 10,485,760 tokens.
RECORD_28_FIRST_SITTING = [(22.1, 4.0273), (44.2, 3.6910), (66.3, 3.4921)]  # 2026-11-21
RECORD_28_SECOND_SITTING = [(0.0, 10.8258), (21.5, 4.0216), (66.8, 3.4925)]  # 2026-11-22
# Each of these is the end of a run of its own: 270, 345, 345 and 515 steps. The third is of the
# second sitting, the others are of the first one.
RECORD_89 = [(31.0, 3.5623), (39.3, 3.4755), (41.0, 3.4715), (58.2, 3.3622)]

RED = "#b5432a"


def draw(path):
    log = read_log(OURS)
    fig, (ax,) = plots.figure(1, 1, 7.2, 3.9)

    trained = [step for step in log.steps if step.split == "train"]
    seconds = [step.time_ms / 1000 for step in trained]
    losses = plots.smoothed([step.loss for step in trained])
    whole = slice(len(losses) // 100, -(len(losses) // 100))  # at both ends the mean is of few
    ax.plot(seconds[whole], losses[whole], color=plots.RUN, lw=1.2)
    end = log.validations[-1]
    ax.plot([end.time_ms / 1000], [end.loss], "o", color=plots.RUN, ms=7)

    ax.plot(*zip(*RECORD_28_FIRST_SITTING), "s:", color=plots.MUTED, lw=0.8, ms=5, mfc="white")
    ax.plot(*zip(*RECORD_28_SECOND_SITTING), "s", color=plots.INK, ms=5)
    ax.plot(*zip(*RECORD_89), "D", color=RED, ms=5)
    ax.axhline(TARGET, color=plots.INK, lw=0.8, ls=plots.DASHED, zorder=0)

    def label(text, x, y, color, ha="left"):
        ax.text(x, y, text, color=color, fontsize=9, ha=ha, va="center", bbox=plots.WHITE)

    label(f"ours: {end.loss:.4f} after {end.time_ms / 1000:.1f} s\n"
          "line: training loss, smoothed; point: validation", 7.6, 4.36, plots.RUN)
    label("record 28's own code: 3.4925 after 66.8 s\n"
          "validations of two runs (filled, hollow)", 29, 4.02, plots.INK)
    label("record 89's own code: 3.4715 after 41.0 s\n"
          "validations at the ends of four runs", 56.5, 3.32, RED, "right")
    label(f"target {TARGET}", 0.4, TARGET - 0.05, plots.INK)
    ax.set(xlim=(0, 70), ylim=(3.25, 4.6), xlabel="training time on four H200 (s)",
           ylabel="loss (nats per token)")
    plots.save(fig, path)


if __name__ == "__main__":
    draw(HERE / "headline.png")
