"""The pictures: the loss curves of a record, the curves of any runs, and the progress of a track.
They are drawn without a display."""
import math
from pathlib import Path

from .log import Refused, shown_key
from .stats import INSTALL

INK = "#222222"
RUN = "#1f5fa8"
MUTED = "#8a8a8a"
PALE = "#d0d0d0"
DASHED = (0, (4, 3))
# the box behind a label, so that no line crosses the text
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
# The times of others' code, published or measured by us (headline.py): a word in data_name, the
# hardware (None for any), the target, the label, the seconds.
FOUR = "4 x NVIDIA H200"
REFERENCES = (
    ("fineweb", None, 3.28, "record 28, 8 x H100\n168.7 s (published,\nnot measured)", 168.7),
    ("fineweb", None, 3.28, "record 89, 8 x H100\n73.8 s (published,\nnot measured)", 73.8),
    ("stand-in", FOUR, 3.492, "record 28's own code\n66.3 s (reference,\nnot ours)", 66.3),
    ("stand-in", FOUR, 3.492, "record 89's own code\nabout 37.7 s (reference,\nnot ours)", 37.7),
)


def seconds_at(log, step):
    return step.time_ms / 1000


def million_tokens_at(log, step):
    return log.tokens_at(step.step) / 1e6


def number_of(log, step):
    return step.step


# name of an x axis: its label, and the function that places a step line of a log on it
AXES = {
    "time": ("training time (s)", seconds_at),
    "tokens": ("training tokens (millions)", million_tokens_at),
    "steps": ("step", number_of),
}


def figure_class():
    """Returns matplotlib's Figure, after setting the plain style of all pictures. Raises Refused
    where matplotlib is not installed."""
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
    """Returns a figure and the flat list of its axes. The width is that of the figure, the height
    is that of one row."""
    fig = figure_class()(figsize=(width, height * rows), layout="constrained")
    axes = fig.subplots(rows, columns, squeeze=False)
    return fig, axes.ravel()


def save(fig, path, description=None):
    """Writes the picture, with the description as text inside the file. Raises Refused if the file
    cannot be written."""
    metadata = {"Software": None}
    if description is not None:
        metadata["Description"] = description
    try:
        fig.savefig(path, format="png", dpi=200, metadata=metadata)
    except OSError as error:
        raise Refused(f"{path}: cannot be written ({error.strerror}).") from None


def training_steps(log):
    return [step for step in log.steps if step.split == "train"]


def later_validations(log):
    """Returns all validations but that of step 0, whose high loss would squeeze the rest flat."""
    return [step for step in log.validations if step.step > 0]


def curve(log, steps, place_of):
    """Returns two lists, for the x axis and for the y axis: the place of each step line, which the
    function `place_of` tells, and its loss."""
    places = [place_of(log, step) for step in steps]
    losses = [step.loss for step in steps]
    return places, losses


def draw_target(ax, target):
    ax.axhline(target, color=INK, lw=0.8, ls=DASHED, label=f"target {target:g}")


def draw_loss(path, logs, target):
    """Draws the runs of a record over training time and, beside it, over tokens."""
    fig, axes = figure(2, 1, 8.0, 3.2)
    draw_validations(axes[0], logs, target, "time")
    draw_validations(axes[1], logs, target, "tokens")
    axes[0].set_ylabel("loss (nats per token)")
    axes[0].legend(loc="upper right")
    axes[1].tick_params(labelleft=False)
    save(fig, path)


def draw_validations(ax, logs, target, x):
    """Draws the validation losses of each run, the target, and the training losses of the first
    run. `x` is a key of AXES."""
    label, place_of = AXES[x]
    places, losses = curve(logs[0], training_steps(logs[0]), place_of)
    ax.plot(places, losses, color=PALE, lw=0.6, label="training, first run")
    highest = 0.0
    lowest = target
    legend = f"validation, n = {len(logs)} runs"
    for log in logs:
        places, losses = curve(log, later_validations(log), place_of)
        marker = "o" if len(losses) < 40 else ""
        ax.plot(places, losses, color=RUN, lw=0.9, alpha=0.75, ms=3, marker=marker, label=legend)
        legend = None  # the first run stands in the legend for all
        highest = max([highest, *losses])
        lowest = min(lowest, log.end["val_loss"])
    draw_target(ax, target)
    span = min(max(highest - lowest, 0.6), 1.5)
    ax.set_xlabel(label)
    ax.set_xlim(0, None)
    ax.set_ylim(lowest - 0.1 * span, lowest + 1.1 * span)


def smoothed(losses):
    """Returns the mean of each loss and its neighbours. They are a fiftieth of the run, and fewer
    towards both ends, where a loss has as many on each side as the nearer end leaves."""
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
    """Returns the text of each run in the legend: its run_name and its seed. Without a run_name it
    is the name of its file, or if the files lie in several folders, the folder and the first eight
    characters of that name. If two runs had the same text, each has its file with the folder in
    place of the name."""
    several = len({Path(log.path).parent for log in logs}) > 1
    names = []
    for log in logs:
        path = Path(log.path)
        name = f"{path.parent.name}/{path.stem[:8]}" if several else path.stem
        name = log.config["run_name"] or name
        names.append(f" {name}" if name.startswith("_") else name)  # Matplotlib hides others
    seeds = [log.config["seed"] for log in logs]
    different = set(zip(names, seeds))
    if len(different) < len(logs):
        names = ["/".join(Path(log.path).parts[-2:]) for log in logs]
    texts = []
    for name, seed in zip(names, seeds):
        text = f"{shown_key(name)}, seed {seed}"
        texts.append(text.replace("$", r"\$"))  # or matplotlib reads a formula between two $
    return texts


MOST_IN_LEGEND = 12  # runs, for which there is room


def draw_curves(path, logs, x):
    """Draws the curves of any runs, a colour each. `x` is a key of AXES."""
    label, place_of = AXES[x]
    fig, (ax,) = figure(1, 1, 7.0, 4.2)
    heights = []
    targets = set()
    for i, (log, name) in enumerate(zip(logs, legends(logs))):
        heights += draw_run(ax, log, place_of, name, color=f"C{i % 10}")
        if log.end.get("target") is not None:
            targets.add(log.end["target"])
    for target in sorted(targets):
        draw_target(ax, target)
        heights.append(target)
    if heights:
        lowest = min(heights)
        highest = max(heights)
        margin = 0.05 * (highest - lowest) or 0.1
        ax.set_ylim(lowest - margin, highest + margin)
    ax.set(xlabel=label, ylabel="loss (nats per token)")
    ax.set_title("lines: training loss, smoothed; points: validation", loc="left", fontsize=9)
    handles, labels = ax.get_legend_handles_labels()  # of the runs, then of the targets
    left_out = slice(MOST_IN_LEGEND, len(logs))
    title = None
    if len(logs) > MOST_IN_LEGEND:
        title = f"the first {MOST_IN_LEGEND} of {len(logs)} runs"
        del handles[left_out], labels[left_out]
    ax.legend(handles, labels, loc="upper right", fontsize=7, title=title, title_fontsize=7)
    save(fig, path)


def draw_run(ax, log, place_of, name, color):
    """Draws the smoothed training losses of a run as a line and its validations as points. Returns
    the losses that the picture must show: those of the first twentieth of the run are left out,
    because they would squeeze the rest flat."""
    places, losses = curve(log, training_steps(log), place_of)
    means = smoothed(losses)
    ax.plot(places, means, color=color, lw=1.0, alpha=0.8, label=name)
    validations = later_validations(log)
    places, losses = curve(log, validations, place_of)
    ax.plot(places, losses, "o", color=color, ms=4)
    start = len(means) // 20
    return means[start:] + [step.loss for step in validations if step.step > start]


def draw_progress(path, tracks, description):
    """Draws the training times of the records, one panel for each track. `tracks` is a list of
    (title, records that reached the target, whether each of them is ranked). The description goes
    into the file as text."""
    most = max(len(records) for _, records, _ in tracks)
    fig, axes = figure(1, len(tracks), max(6.5, 1.7 + 0.6 * most), 3.0)
    labels = []
    for ax, (title, records, ranked) in zip(axes, tracks):
        members = sorted(zip(records, ranked), key=date_of)
        labels += draw_track(ax, members)
        draw_references(ax, records[0])
        ax.set_title(title, loc="left", fontsize=9)
        ax.set_ylabel("training time (s)")
        _, top = ax.get_ylim()
        ax.set_ylim(0, 1.2 * top)
    axes[-1].set_xlabel("the records in the order of their dates (UTC)")
    separate(fig, labels)
    save(fig, path, description)


def date_of(member):
    """Returns when the first run of a (record, whether it is ranked) began, such as
    2026-11-21T09:30:00Z."""
    record, _ = member
    return record["runs"][0]["date"]


def draw_track(ax, members):
    """Draws the points and the line of one track. `members` is a list of (record, whether it is
    ranked) in the order of the dates. The records stand at equal distances, because many may be of
    one day. Returns the labels of the points."""
    draw_best(ax, members)
    labels = []
    ticks = []
    for place, member in enumerate(members):
        record, is_ranked = member
        seconds = record["time_s"]["mean"]
        inside = RUN if is_ranked else "white"
        ax.plot([place], [seconds], "o", color=RUN, ms=5, mfc=inside)
        labels.append(ax.annotate(
            f"{seconds:.1f} s", (place, seconds), xytext=(5, 5), textcoords="offset points",
            fontsize=8, bbox=WHITE))
        date = date_of(member)
        ticks.append(f"{date[:10]}\n{date[11:16]}")
    ax.plot([], [], "o", color=RUN, ms=5, label="mean below the target at p < 0.01")
    ax.plot([], [], "o", color=RUN, ms=5, mfc="white", label="not shown to be below it")
    ax.legend(loc="lower left", fontsize=7)
    ax.set_xticks(range(len(members)), ticks, fontsize=7)
    ax.set_xlim(-0.5, len(members) - 0.5)
    return labels


def draw_best(ax, members):
    """Draws the time of the best ranked record so far as a line of steps, which begins at the first
    ranked record. Without one there is no line."""
    best = math.inf
    places = []
    times = []
    for place, (record, is_ranked) in enumerate(members):
        if is_ranked:
            best = min(best, record["time_s"]["mean"])
        if best < math.inf:
            places.append(place)
            times.append(best)
    if times:
        places.append(len(members) - 0.5)
        times.append(best)
        ax.step(places, times, where="post", color=RUN, lw=1.2)


def draw_references(ax, record):
    """Draws the times of others on the track of this record, with their labels to the right."""
    for word, hardware, target, label, seconds in REFERENCES:
        same_data = word in record["data_name"].lower()
        same_hardware = hardware in (None, record["hardware"]["summary"])
        if same_data and same_hardware and target == record["target"]:
            ax.axhline(seconds, color=MUTED, lw=0.8, ls=DASHED, zorder=0)
            ax.annotate(
                label, (1.01, seconds), xycoords=("axes fraction", "data"), va="center",
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
