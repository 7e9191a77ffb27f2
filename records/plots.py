"""Pictures of losses, by matplotlib (requirements-dev.txt), without a display."""
from pathlib import Path
from statistics import fmean

from .log import Log


def smoothed(losses: list[float]) -> list[float]:
    """The mean of each loss and its neighbours, a fiftieth of the run."""
    half = len(losses) // 100
    return [fmean(losses[max(0, i - half) : i + half + 1]) for i in range(len(losses))]


def draw_run(axes, log: Log, color: str) -> None:
    """A run's smoothed training losses as a thin line, and its validations as points. That of step
    0 is left out, because its high loss would press the rest flat."""
    name = log.config.get("run_name") or Path(log.path).resolve().parent.name
    label = f"{name[:40]}, seed {log.config['seed']}".replace("$", r"\$")
    train = [step for step in log.steps if step.split == "train"]
    val = [step for step in log.steps if step.split == "val" and step.step > 0]
    losses = smoothed([step.loss for step in train])
    places = (lambda step: step.time_ms / 1000,
              lambda step: log.tokens_at(step.step) / 1e6)
    for ax, place in zip(axes, places):
        ax.plot([place(step) for step in train], losses, color=color, lw=0.7, alpha=0.6)
        ax.plot([place(step) for step in val], [step.loss for step in val], "o", color=color, ms=3,
                label=label)


def curves(logs: list[Log]):
    """A figure of the runs, a colour each, over time and over tokens. A dashed line is a target."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 4.2), dpi=160, layout="constrained")
    axes = figure.subplots(1, 2)
    for i, log in enumerate(logs):
        draw_run(axes, log, f"C{i % 10}")
    losses = [step.loss for log in logs for step in log.steps]
    targets = {log.end["target"] for log in logs if log.end.get("target")}
    lowest = min(losses, default=0)
    for ax, name in zip(axes, ("training time (s)", "training tokens (millions)")):
        for target in sorted(targets):
            ax.axhline(target, color="black", lw=0.8, ls="--", label=f"target {target:g}")
        ax.set_ylim(lowest - 0.1, lowest + 1.5)  # heights at which the end of the runs can be seen
        ax.set_xlabel(name)
    axes[0].set_ylabel("loss")
    axes[-1].legend(loc="upper right")
    return figure
