"""Where the time of a step goes: --profile_steps, with PyTorch's profiler."""

import torch
from torch.profiler import profile

from records.console import complain

AFTER = 10  # steps of this run: what runs for the first time takes longer
ROWS = 40  # of the table


class Profiler:
    """Profiles so many steps of this rank, and writes two files beside the log: a table of what
    took most time, and a trace that shows each kernel on a time line (ui.perfetto.dev)."""

    def __init__(self, steps: int, first_step: int, num_steps: int, log, device: torch.device):
        """The run goes from first_step, as it may go on from a save, to num_steps. log:
        journal.Log"""
        self.begin = first_step + AFTER
        self.steps = max(0, min(steps, num_steps - self.begin))
        if steps and not self.steps:
            complain(f"no step is profiled: --profile_steps begins after {AFTER} steps, and the "
                     "run ends before")
        self.log = log
        self.device = device
        self.running = None

    def before_step(self, step: int) -> None:
        if self.steps and step == self.begin:
            self.log.fact("defect", dict(what=f"{self.steps} steps were profiled: it takes time"))
            torch.get_device_module(self.device).synchronize()
            self.running = profile()
            self.running.start()
        if step == self.begin + self.steps:
            self.finish()

    def finish(self) -> None:
        """Writes the files if steps were profiled and this has not been done."""
        if not self.running:
            return
        torch.get_device_module(self.device).synchronize()
        self.running.stop()
        kind = "cpu" if self.device.type == "cpu" else "device"
        table = self.running.key_averages().table(
            sort_by=f"self_{kind}_time_total", row_limit=ROWS, max_name_column_width=80)
        try:
            self.log.path.with_suffix(".profile").write_text(table, encoding="utf-8")
            self.running.export_chrome_trace(str(self.log.path.with_suffix(".trace.json.gz")))
        except OSError as error:
            complain(f"the profile cannot be written ({error.strerror}); the run goes on")
        self.running = None
