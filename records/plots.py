"""The two pictures: a record's loss curves, and the progress of a track. Drawn without a display."""
from datetime import datetime, timedelta

INK, RUN, MUTED, DASHED = "#222222", "#1f5fa8", "#8a8a8a", (0, (4, 3))
# (word in data_name, hardware or None for any, target, label, seconds); never measurements of ours
REFERENCES = (
    ("fineweb", None, 3.28, "record 28, 8 x H100\n168.7 s (published,\nnot measured)", 168.7),
    ("fineweb", None, 3.28, "record 89, 8 x H100\n73.8 s (published,\nnot measured)", 73.8),
    ("stand-in", "4 x NVIDIA H200", 3.492, "record 28's own code\n66.3 s (reference,\nnot ours)", 66.3),
    ("stand-in", "4 x NVIDIA H200", 3.492, "record 89's own code\nabout 37.7 s (reference,\nnot ours)", 37.7),
)


def figure(columns, rows, width, height):
    """A figure and its flat list of axes, in one plain style."""
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
                                "axes.edgecolor": INK, "axes.labelcolor": INK, "legend.frameon": False})
    fig = Figure(figsize=(width, height * rows), layout="constrained")
    return fig, fig.subplots(rows, columns, squeeze=False).ravel()


def draw_loss(path, logs, target):
    """Validation loss over training time and over tokens: a thin line a run, the target, and one training loss."""
    fig, axes = figure(2, 1, 8.0, 3.2)
    for ax, label, of in zip(axes, ("training time (s)", "training tokens (millions)"),
                             (lambda log, s: s.time_ms / 1000, lambda log, s: log.tokens_at(s.step) / 1e6)):
        trained = [s for s in logs[0].steps if s.split == "train"]
        ax.plot([of(logs[0], s) for s in trained], [s.loss for s in trained], color="#d0d0d0", lw=0.6,
                label="training, first run")
        for i, log in enumerate(logs):
            seen = [s for s in log.validations if s.step]  # step 0 would squeeze the rest flat
            ax.plot([of(log, s) for s in seen], [s.loss for s in seen], color=RUN, lw=0.9, alpha=0.75, ms=3,
                    marker="o" if len(seen) < 40 else "", label=None if i else f"validation, n = {len(logs)} runs")
        ax.axhline(target, color=INK, lw=0.8, ls=DASHED, label=f"target {target:g}")
        highest = max(s.loss for log in logs for s in log.validations if s.step)
        lowest = min(target, *(log.end["val_loss"] for log in logs))
        span = min(max(highest - lowest, 0.6), 1.5)
        ax.set(xlabel=label, xlim=(0, None), ylim=(lowest - 0.1 * span, lowest + 1.1 * span))
    axes[0].set_ylabel("loss (nats per token)")
    axes[0].legend(loc="upper right")
    axes[1].tick_params(labelleft=False)
    fig.savefig(path, dpi=200, metadata={"Software": None})


def draw_progress(path, tracks):
    """Record time over date, one panel a track: `tracks` is [(title, records that reached the target)]."""
    from matplotlib.dates import DateFormatter
    from matplotlib.ticker import LinearLocator
    fig, axes = figure(1, len(tracks), 6.5, 3.0)
    for ax, (title, records) in zip(axes, tracks):
        records = sorted(records, key=lambda r: r["runs"][0]["date"])
        dates = [datetime.strptime(r["runs"][0]["date"], "%Y-%m-%dT%H:%M:%SZ") for r in records]
        times = [r["time_s"]["mean"] for r in records]
        end = dates[-1] + max(timedelta(days=1), 0.15 * (dates[-1] - dates[0]))
        best = [min(times[:i + 1]) for i in range(len(times))]
        ax.step([*dates, end], [*best, best[-1]], where="post", color=RUN, lw=1.2)
        ax.plot(dates, times, "o", color=RUN, ms=4)
        for date, seconds in zip(dates, times):
            ax.annotate(f"{seconds:.1f} s", (date, seconds), xytext=(4, 4), textcoords="offset points", fontsize=8)
        for word, hardware, target, label, seconds in REFERENCES:
            if (word in records[0]["data_name"].lower() and hardware in (None, records[0]["hardware"]["summary"])
                    and target == records[0]["target"]):
                ax.axhline(seconds, color=MUTED, lw=0.8, ls=DASHED, zorder=0)
                ax.annotate(label, (1.01, seconds), xycoords=("axes fraction", "data"), va="center", fontsize=7,
                            color=MUTED, annotation_clip=False)
        ax.set_title(title, loc="left", fontsize=9)
        ax.set(ylabel="training time (s)", ylim=(0, 1.15 * ax.get_ylim()[1]), xlim=(dates[0] - (end - dates[-1]), end))
        ax.xaxis.set_major_locator(LinearLocator(3))
        ax.xaxis.set_major_formatter(DateFormatter("%Y-%m-%d"))
    fig.savefig(path, dpi=200, metadata={"Software": None})
