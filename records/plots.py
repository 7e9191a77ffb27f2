"""The pictures: a record's loss curves, the curves of any runs, and the progress of a track. Drawn
without a display."""
from pathlib import Path

from .log import Refused, shown_key
from .stats import INSTALL

INK = "#222222"
RUN = "#1f5fa8"
MUTED = "#8a8a8a"
PALE = "#d0d0d0"
DASHED = (0, (4, 3))
# behind a label, so that no line crosses it
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
# (word in data_name, hardware or None for any, target, label, seconds); never measurements of ours
FOUR = "4 x NVIDIA H200"
REFERENCES = (
    ("fineweb", None, 3.28, "record 28, 8 x H100\n168.7 s (published,\nnot measured)", 168.7),
    ("fineweb", None, 3.28, "record 89, 8 x H100\n73.8 s (published,\nnot measured)", 73.8),
    ("stand-in", FOUR, 3.492, "record 28's own code\n66.3 s (reference,\nnot ours)", 66.3),
    ("stand-in", FOUR, 3.492, "record 89's own code\nabout 37.7 s (reference,\nnot ours)", 37.7),
)
AXES = {  # name of an x axis: its label, and the value of a step line
    "time": ("training time (s)", lambda log, s: s.time_ms / 1000),
    "tokens": ("training tokens (millions)", lambda log, s: log.tokens_at(s.step) / 1e6),
    "steps": ("step", lambda log, s: s.step),
}


def figure_class():
    """matplotlib's Figure. Raises Refused where matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        sentence = f"drawing needs matplotlib, which is not installed here; {INSTALL}."
        raise Refused(sentence) from None
    matplotlib.rcParams.update({
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "legend.frameon": False,
    })
    return Figure


def figure(columns, rows, width, height):
    """A figure and its flat list of axes, in one plain style."""
    fig = figure_class()(figsize=(width, height * rows), layout="constrained")
    return fig, fig.subplots(rows, columns, squeeze=False).ravel()


def save(fig, path, description=None):
    """Writes the picture. The description goes into it as text. Raises Refused if it cannot be."""
    metadata = {"Software": None}
    if description is not None:
        metadata["Description"] = description
    try:
        fig.savefig(path, format="png", dpi=200, metadata=metadata)
    except OSError as error:
        raise Refused(f"{path}: cannot be written ({error.strerror}).") from None


def draw_loss(path, logs, target):
    """Validation loss over training time and over tokens: a thin line a run, the target, and one
    training loss."""
    fig, axes = figure(2, 1, 8.0, 3.2)
    for ax, name in zip(axes, ("time", "tokens")):
        label, of = AXES[name]
        trained = [s for s in logs[0].steps if s.split == "train"]
        ax.plot([of(logs[0], s) for s in trained], [s.loss for s in trained], color=PALE, lw=0.6,
                label="training, first run")
        for i, log in enumerate(logs):
            seen = [s for s in log.validations if s.step]  # step 0 would squeeze the rest flat
            marker = "o" if len(seen) < 40 else ""
            legend = None if i else f"validation, n = {len(logs)} runs"
            ax.plot([of(log, s) for s in seen], [s.loss for s in seen], color=RUN, lw=0.9,
                    alpha=0.75, ms=3, marker=marker, label=legend)
        ax.axhline(target, color=INK, lw=0.8, ls=DASHED, label=f"target {target:g}")
        highest = max(s.loss for log in logs for s in log.validations if s.step)
        lowest = min(target, *(log.end["val_loss"] for log in logs))
        span = min(max(highest - lowest, 0.6), 1.5)
        ax.set(xlabel=label, xlim=(0, None), ylim=(lowest - 0.1 * span, lowest + 1.1 * span))
    axes[0].set_ylabel("loss (nats per token)")
    axes[0].legend(loc="upper right")
    axes[1].tick_params(labelleft=False)
    save(fig, path)


def smoothed(losses):
    """The mean of each loss and its neighbours: of a fiftieth of the run, fewer at both ends."""
    half = len(losses) // 100
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    means = []
    for i in range(len(losses)):
        reach = min(half, i, len(losses) - 1 - i)
        total = sums[i + reach + 1] - sums[i - reach]
        means.append(total / (2 * reach + 1))
    return means


def legends(logs):
    """What each run is called in the legend: its run_name or its file, and its seed. If that does
    not tell the runs apart, the file with its folder, and the seed."""
    names = [log.config["run_name"] or Path(log.path).stem for log in logs]
    seeds = [log.config["seed"] for log in logs]
    if len(set(zip(names, seeds))) < len(logs):
        names = ["/".join(Path(log.path).parts[-2:]) for log in logs]
    texts = [f"{shown_key(name)}, seed {seed}" for name, seed in zip(names, seeds)]
    return [text.replace("$", r"\$") for text in texts]  # between two $ matplotlib sets formulae


def draw_curves(path, logs, x):
    """The curves of any runs, a colour each: the smoothed training loss as a line, the validations
    as points. `x` is a key of AXES."""
    label, of = AXES[x]
    fig, (ax,) = figure(1, 1, 7.0, 4.2)
    heights = []
    names = legends(logs)
    for i, log in enumerate(logs):
        color = f"C{i % 10}"
        trained = [s for s in log.steps if s.split == "train"]
        means = smoothed([s.loss for s in trained])
        ax.plot([of(log, s) for s in trained], means, color=color, lw=1.0, alpha=0.8,
                label=names[i])
        seen = [s for s in log.validations if s.step]
        ax.plot([of(log, s) for s in seen], [s.loss for s in seen], "o", color=color, ms=4)
        start = len(means) // 20  # the first losses would squeeze the rest flat
        heights += means[start:] + [s.loss for s in seen if s.step > start]
    targets = {log.end["target"] for log in logs if log.end.get("target") is not None}
    for target in sorted(targets):
        ax.axhline(target, color=INK, lw=0.8, ls=DASHED, label=f"target {target:g}")
    heights += targets
    if heights:
        margin = 0.05 * (max(heights) - min(heights)) or 0.1
        ax.set_ylim(min(heights) - margin, max(heights) + margin)
    ax.set(xlabel=label, ylabel="loss (nats per token)")
    ax.set_title("lines: training loss, smoothed; points: validation", loc="left", fontsize=9)
    ax.legend(loc="upper right", fontsize=7)
    save(fig, path)


def draw_progress(path, tracks, description):
    """Training time of the records in the order of their dates, one panel a track. `tracks` is
    [(title, records that reached the target, whether each is ranked)]. The records stand at equal
    distances, because many may be of one day. The line is that of the best ranked record so far."""
    most = max(len(records) for _, records, _ in tracks)
    fig, axes = figure(1, len(tracks), max(6.5, 1.7 + 0.6 * most), 3.0)
    labels = []
    for ax, (title, records, ranked) in zip(axes, tracks):
        order = sorted(range(len(records)), key=lambda i: records[i]["runs"][0]["date"])
        records = [records[i] for i in order]
        ranked = [ranked[i] for i in order]
        labels += draw_track(ax, records, ranked)
        draw_references(ax, records[0])
        ax.set_title(title, loc="left", fontsize=9)
        ax.set(ylabel="training time (s)", ylim=(0, 1.2 * ax.get_ylim()[1]))
    axes[-1].set_xlabel("the records in the order of their dates (UTC)")
    separate(fig, labels)
    save(fig, path, description)


def draw_track(ax, records, ranked):
    """Draws the points and the line of one track. Returns the labels of the points."""
    times = [r["time_s"]["mean"] for r in records]
    places = range(len(records))
    best = None
    line_x = []
    line_y = []
    for i in places:
        if ranked[i] and (best is None or times[i] < best):
            best = times[i]
        if best is not None:
            line_x.append(i)
            line_y.append(best)
    if best is not None:
        ax.step([*line_x, len(records) - 0.5], [*line_y, best], where="post", color=RUN, lw=1.2)
    labels = []
    for i in places:
        ax.plot([i], [times[i]], "o", color=RUN, ms=5, mfc=RUN if ranked[i] else "white")
        labels.append(ax.annotate(f"{times[i]:.1f} s", (i, times[i]), xytext=(5, 5),
                                  textcoords="offset points", fontsize=8, bbox=WHITE))
    ax.plot([], [], "o", color=RUN, ms=5, label="mean below the target at p < 0.01")
    ax.plot([], [], "o", color=RUN, ms=5, mfc="white", label="not shown to be below it")
    ax.legend(loc="lower left", fontsize=7)
    dates = [r["runs"][0]["date"] for r in records]  # 2026-11-21T09:30:00Z
    ax.set_xticks(places, [f"{date[:10]}\n{date[11:16]}" for date in dates], fontsize=7)
    ax.set_xlim(-0.5, len(records) - 0.5)
    return labels


def draw_references(ax, record):
    """Draws the times of others on the track of this record, with their labels to the right."""
    for word, hardware, target, label, seconds in REFERENCES:
        same_data = word in record["data_name"].lower()
        same_hardware = hardware in (None, record["hardware"]["summary"])
        if same_data and same_hardware and target == record["target"]:
            ax.axhline(seconds, color=MUTED, lw=0.8, ls=DASHED, zorder=0)
            ax.annotate(label, (1.01, seconds), xycoords=("axes fraction", "data"), va="center",
                        fontsize=7, color=MUTED, annotation_clip=False)


def separate(fig, labels):
    """Moves each label up until it covers none of those before it."""
    fig.draw_without_rendering()
    taken = []
    for label in labels:
        box = label.get_window_extent()
        while any(box.overlaps(other) for other in taken):
            x, y = label.get_position()
            label.set_position((x, y + 4))
            box = label.get_window_extent()
        taken.append(box)
