"""Where the time of a step goes: --profile_steps, with PyTorch's profiler."""
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.profiler import profile, schedule

from nanogpt.ranks import is_rank_0

AFTER = 10  # steps of this run: what runs for the first time takes longer
ROWS = 40  # of the table


@contextmanager
def profiled(steps: int, log) -> Iterator[Callable]:
    """Within it, so many steps of rank 0 are profiled, and two files are written beside the log: a
    table of what took most time, and a trace that shows each kernel on a time line
    (ui.perfetto.dev). Yields a function to be called after each step. log: journal.Log"""
    if not (steps and is_rank_0()):
        yield lambda: None
        return

    def write(profiled: profile) -> None:
        log.fact("defect", dict(what=f"up to {steps} steps were profiled: it takes time"))
        averages = profiled.key_averages()
        has_gpu = any(event.self_device_time_total for event in averages)
        kind = "device" if has_gpu else "cpu"
        table = averages.table(
            sort_by=f"self_{kind}_time_total", row_limit=ROWS, max_name_column_width=80)
        log.path.with_suffix(".profile").write_text(table, encoding="utf-8")
        profiled.export_chrome_trace(str(log.path.with_suffix(".trace.json.gz")))

    moments = schedule(wait=AFTER - 1, warmup=1, active=steps, repeat=1)
    with profile(schedule=moments, on_trace_ready=write) as profiler:
        yield profiler.step
