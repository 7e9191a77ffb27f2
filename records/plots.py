"""Pictures of losses, by matplotlib (requirements-dev.txt), without a display."""
from pathlib import Path
from statistics import fmean

from .log import PER_RUN, Log, Refused

INK = "#222222"
RUN = "#1f5fa8"
# What an axis shows of a step of a log.
AXES = {
    "time": ("training time (s)", lambda log, step: step.time_ms / 1000),
    "tokens": ("training tokens (millions)", lambda log, step: log.tokens_at(step.step) / 1e6),
    "steps": ("step", lambda log, step: step.step),
}


def figure(columns: int, width: float, height: float):
    """A figure and its axes, side by side. Raises Refused without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Refused("pictures need matplotlib: pip install -r requirements-dev.txt") from None
    fig = Figure(figsize=(width, height), dpi=160, layout="constrained")
    return fig, fig.subplots(1, columns, squeeze=False)[0]


def smoothed(losses: list[float]) -> list[float]:
    """The mean of each loss and its neighbours, a fiftieth of the run."""
    half = len(losses) // 100
    return [fmean(losses[max(0, i - half) : i + half + 1]) for i in range(len(losses))]


def draw_run(ax, log: Log, x: str, color: str, label: str | None) -> None:
    """A run's smoothed training losses as a thin line, its validations as points, but for that of
    step 0, whose high loss would press the rest flat."""
    _, place = AXES[x]

    def points(split: str) -> tuple[list[float], list[float]]:
        steps = [step for step in log.steps if step.split == split and step.step > 0]
        return [place(log, step) for step in steps], [step.loss for step in steps]

    places, losses = points("train")
    ax.plot(places, smoothed(losses), color=color, lw=0.7, alpha=0.6)
    ax.plot(*points("val"), "o", color=color, ms=3, label=label)


def frame(ax, logs: list[Log], x: str) -> None:
    """Labels, the targets as dashed lines, and heights at which the end of the runs can be seen."""
    losses = [step.loss for log in logs for step in log.steps]
    for target in sorted({log.end["target"] for log in logs if log.end.get("target")}):
        ax.axhline(target, color=INK, lw=0.8, ls="--", label=f"target {target:g}")
        losses.append(target)
    lowest = min(losses, default=0.0)
    ax.set_ylim(lowest - 0.1, lowest + 1.5)
    ax.set_xlabel(AXES[x][0])
    ax.set_xlim(0, None)


def picture_of_record(logs: list[Log]):
    """The runs of a record over training time and, beside it, over tokens."""
    fig, axes = figure(2, 8.0, 3.2)
    for ax, x in zip(axes, ("time", "tokens")):
        for i, log in enumerate(logs):
            draw_run(ax, log, x, RUN, f"validation, {len(logs)} runs" if i == 0 else None)
        frame(ax, logs, x)
    axes[0].set_ylabel("loss (nats per token)")
    axes[0].legend(loc="upper right")
    return fig


def names_of(logs: list[Log]) -> list[str]:
    """What to call each run: its --run_name; else its folder, if they are in several, and the
    settings in which the runs differ; else its file."""
    configs = [log.config for log in logs]
    several = len({Path(log.path).parent for log in logs}) > 1
    differ = [key for key in sorted(set().union(*configs), key=lambda key: (key != "preset", key))
              if key not in PER_RUN and len({repr(config.get(key)) for config in configs}) > 1]
    names = []
    for log in logs:
        path = Path(log.path).resolve()
        parts = [path.parent.name] if several else []
        parts += [f"{key}={log.config.get(key)}" for key in differ]
        names.append(log.config.get("run_name") or ", ".join(parts) or path.stem)
    return names


def draw_curves(path: str, logs: list[Log], x: str) -> None:
    """Any runs, a colour each."""
    fig, (ax,) = figure(1, 7.0, 4.2)
    for i, (log, name) in enumerate(zip(logs, names_of(logs))):
        label = f"{name[:40]}, seed {log.config['seed']}".replace("$", r"\$")
        draw_run(ax, log, x, f"C{i % 10}", label)
    frame(ax, logs, x)
    ax.set_ylabel("loss")
    ax.legend(loc="upper right")
    fig.savefig(path, format="png")
