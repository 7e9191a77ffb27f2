"""What a run leaves behind: saves from which it can go on, the best weights, and its result.

The loop of training is `Run` in train_gpt.py. It asks the Keeper whether a save is due, and tells
it to save when all ranks have agreed, what a validation has found, and how the run has ended.
"""
import dataclasses
from contextlib import suppress
from pathlib import Path

from nanogpt import checkpoint, finite, saving, stopping
from nanogpt.inputs import Inputs
from nanogpt.ranks import agreed, all_ranks
from records import journal


class Keeper:
    """Keeps one run. `step`: how many updates were made before it, if it goes on from a save."""

    def __init__(self, c, optimizer, inputs: Inputs, facts: journal.RunFacts, log: journal.Log,
                 clock: journal.Clock):
        """`c` and `optimizer` are train_gpt.Config and Optimizer. Loads the save, if the run goes
        on from one; raises BadInput if it does not fit. A collective."""
        self.config = c
        self.optimizer = optimizer
        self.model = optimizer.model
        self.path = inputs.checkpoint_path  # of the best weights
        self.facts = facts
        self.log = log
        self.clock = clock
        self.step = 0
        self.best = None  # the checkpoint of the best validation
        self.came_from = []  # the runs that this one goes on with
        if inputs.saved:
            self.go_on(inputs.saved)
        self.run_id = all_ranks(facts.run["run_id"])[0]
        self.saver = saving.Saver(
            Path(c.log_dir, f"{self.run_id}.saved"), c.save_every, c.save_steps, self.tensors(),
            self.came_from, clock.total, self.step)

    # ----------------------------------------------------------------------------------------------
    # Saves

    def go_on(self, saved: saving.Saved) -> None:
        """Begins where the save was made. Raises BadInput if it does not fit. A collective."""
        agreed(saved.restore, self.optimizer)
        self.step = saved.step
        self.best = saved.fact("best") if self.path else None
        self.came_from = saved.history()
        self.clock.total = saved.fact("seconds")
        self.log.repeat(saved.fact("steps"))

    def tensors(self) -> dict:
        """This rank's tensors of a save (nanogpt/saving.py)."""
        counts = dict(
            target_counts=self.model.target_counts, lost_targets=self.model.lost_targets)
        return self.optimizer.tensors() | counts

    def due(self, step: int) -> bool:
        """Whether it is time to save."""
        return self.saver.due(step, self.clock.now())

    def save(self, step: int) -> None:
        """Begins a save, if the run is one that saves. The log must have all losses so far, as
        `Run.read_losses` brings them."""
        if not self.saver.saves:
            return
        tensors = self.tensors()
        finite.check_save(step, tensors)
        optimizer = self.optimizer
        facts = dict(
            config=dataclasses.asdict(self.config), run_id=self.run_id,
            files_sha256=self.facts.run["files_sha256"],
            data=self.facts.data, came_from=self.came_from, best=self.best,
            checkpoint=self.path and str(self.path), seconds=self.clock.now(),
            steps=list(self.log.steps), updates=optimizer.updates,
            bytes_sent=optimizer.bytes_sent, recipes=optimizer.recipes.state())
        random = saving.random_state(self.model.signs.device)
        self.saver.save(step, self.clock.now(), tensors, random, facts)

    # ----------------------------------------------------------------------------------------------
    # The best weights

    def checkpoint(self, step: int, val_loss: float) -> dict:
        """The checkpoint of the weights as they are now."""
        origin = dict(run_id=self.run_id, data=self.facts.data)
        return checkpoint.of_model(self.model, step, val_loss, origin)

    def validated(self, step: int, loss: float) -> None:
        """Keeps these weights if they are the best so far, and were trained."""
        is_best = self.best is None or loss < self.best["val_loss"]
        if self.path and step and is_best:
            self.best = self.checkpoint(step, loss)

    def checkpoint_path(self) -> Path:
        """The file of the weights. One that we have named ourselves is another one if a run that is
        none of this one's has written there meanwhile."""
        if self.config.save_checkpoint != "auto":
            return self.path
        own_runs = [self.run_id, *(Path(folder).stem for folder in self.came_from)]
        with suppress(OSError):  # of a disk that fails: who writes there will say so
            return checkpoint.unused_path(self.path, own_runs)
        return self.path

    def keep_best(self, writing, kind: type | None, error: BaseException | None, trace) -> None:
        """Writes the checkpoint if an error ends the run, and holds the lock `writing` meanwhile
        (watch.py). The other arguments are those of __exit__ of a context manager."""
        if error and self.best and not self.log.has_ended:
            with writing:
                self.log.console.say(checkpoint.keep(self.checkpoint_path(), self.best))

    # ----------------------------------------------------------------------------------------------
    # The end

    def result(self, step: int, tokens: int, flops_per_token: int, startup_s: float) -> dict:
        """The end block of the log (records/README.md) after so many steps and tokens. startup_s:
        seconds from launch to the first timed step."""
        seconds = self.clock.total
        result = journal.result_of(
            self.log.last_val_loss(), self.config.target_loss, step, seconds, tokens)
        speed = tokens / seconds / self.optimizer.world_size
        result["mfu"] = journal.mfu(flops_per_token, speed, self.facts.machine["devices"][0])
        result["peak_memory_mib"] = journal.peak_memory_mib(self.model.signs.device)
        result["compile_s"] = round(startup_s, 1)
        result["code_sha256"] = self.facts.run["code_sha256"]
        return result

    def finish(self, result: dict) -> Path | None:
        """Says what came of the run, and writes the checkpoint. Returns its path, if there is
        one."""
        log = self.log
        for note in self.optimizer.recipes.notes():
            log.fact("note", note)
        log.fact("note", f"{self.optimizer.bytes_per_step()} bytes sent per step and rank")
        lost = int(self.model.lost_targets)
        if lost:
            log.fact("defect", dict(
                what=f"{lost} tokens of rank 0 were no candidates; raise --candidates"))
        log.end(result, self.best["step"] if self.best else None)
        if not self.best:
            return None
        return checkpoint.write_somewhere(self.checkpoint_path(), self.best)

    def ended(self) -> None:
        """The run has come to its end: it needs no saves any more."""
        self.saver.end()

    def stopped(self, step: int, signal: str, path: Path | None) -> int:
        """Says how a run that a signal has ended can go on. Returns the exit status."""
        if self.path and not path:
            self.log.console.say("no weights are kept, as none were validated")
        self.saver.finish()
        command = saving.command(self.saver.newest(), self.config.save_checkpoint)
        self.log.console.stopped(signal, step, path, command)
        return stopping.status_of(signal)
