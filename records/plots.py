"""Pictures of losses, by matplotlib (requirements-dev.txt), without a display."""
from pathlib import Path
from statistics import fmean

from .log import PER_RUN, Log, Refused

# What an axis shows of a step of a log.
AXES = {
    "time": ("training time (s)", lambda log, step: step.time_ms / 1000),
    "tokens": ("training tokens (millions)", lambda log, step: log.tokens_at(step.step) / 1e6),
    "steps": ("step", lambda log, step: step.step),
}


def smoothed(losses: list[float]) -> list[float]:
    """The mean of each loss and its neighbours, a fiftieth of the run."""
    half = len(losses) // 100
    return [fmean(losses[max(0, i - half) : i + half + 1]) for i in range(len(losses))]


def draw_run(ax, log: Log, x: str, color: str, label: str) -> None:
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
        ax.axhline(target, color="black", lw=0.8, ls="--", label=f"target {target:g}")
        losses.append(target)
    lowest = min(losses, default=0.0)
    ax.set_ylim(lowest - 0.1, lowest + 1.5)
    ax.set_xlabel(AXES[x][0])
    ax.set_xlim(0, None)


def labels_of(logs: list[Log]) -> list[str]:
    """What to call each run: its --run_name, else its folder, if they are in several, and the
    settings in which the runs differ; and its seed."""
    configs = [log.config for log in logs]
    several = len({Path(log.path).parent for log in logs}) > 1
    differ = [key for key in sorted(set().union(*configs), key=lambda key: (key != "preset", key))
              if key not in PER_RUN and len({repr(config.get(key)) for config in configs}) > 1]
    labels = []
    for log in logs:
        parts = [Path(log.path).resolve().parent.name] if several else []
        parts += [f"{key}={log.config.get(key)}" for key in differ]
        name = log.config.get("run_name") or ", ".join(parts)
        seed = f"seed {log.config['seed']}"
        labels.append(f"{name[:40]}, {seed}" if name else seed)
    return labels


def curves(logs: list[Log], xs: tuple[str, ...]):
    """A figure of the runs, a colour each, over each of these axes, side by side. Raises Refused
    without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Refused("pictures need matplotlib: pip install -r requirements-dev.txt") from None
    figure = Figure(figsize=(3.0 + 3.5 * len(xs), 4.2), dpi=160, layout="constrained")
    axes = figure.subplots(1, len(xs), squeeze=False)[0]
    for ax, x in zip(axes, xs):
        for i, (log, label) in enumerate(zip(logs, labels_of(logs))):
            draw_run(ax, log, x, f"C{i % 10}", label.replace("$", r"\$"))
        frame(ax, logs, x)
    axes[0].set_ylabel("loss")
    axes[-1].legend(loc="upper right")
    return figure
