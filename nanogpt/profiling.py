"""Where the time of a step goes: --profile_steps, with PyTorch's profiler."""
from pathlib import Path

import torch
from torch.profiler import profile

from records.console import complain

FIRST = 10  # the step before which profiling begins: what runs for the first time takes longer
ROWS = 40  # of the table


class Profiler:
    """Profiles so many steps of this rank, and writes two files beside the log: a table of what
    took most time, and a trace that shows each kernel on a time line (ui.perfetto.dev)."""

    def __init__(self, steps: int, log_file: Path, device: torch.device):
        self.steps = steps
        self.log_file = log_file
        self.device = device
        self.running = None

    def before_step(self, step: int) -> None:
        if self.steps and step == FIRST:
            torch.get_device_module(self.device).synchronize()
            self.running = profile()
            self.running.start()
        if step == FIRST + self.steps:
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
            self.log_file.with_suffix(".profile.txt").write_text(table)
            self.running.export_chrome_trace(str(self.log_file.with_suffix(".trace.json.gz")))
        except OSError as error:
            complain(f"the profile cannot be written ({error.strerror}); the run goes on")
        self.running = None
