"""What a run leaves behind: saves from which it can go on, the best weights, and its result.

The loop of training is `Run` in train_gpt.py. It asks the Keeper whether a save is due, and has it
save when all ranks have agreed. It tells the Keeper what each validation has found, and how the run
has ended.
"""
import dataclasses
from pathlib import Path

from nanogpt import checkpoint, finite, saving, stopping
from nanogpt.ranks import all_ranks, on_all_ranks
from nanogpt.run_files import RunFiles
from records import journal


class Keeper:
    """Keeps one run. `first_step`: the steps that were made before the save from which it goes on,
    or 0."""

    def __init__(self, c, optimizer, run_files: RunFiles, facts: journal.RunFacts, log: journal.Log,
                 clock: journal.Clock):
        """`c` and `optimizer` are train_gpt.Config and Optimizer. Loads the save, if the run goes
        on from one; raises BadInput if it does not fit. A collective."""
        self.config = c
        self.optimizer = optimizer
        self.model = optimizer.model
        # Where the best weights go; None if none are kept, and always on ranks other than 0.
        self.weights_file = run_files.checkpoint_path
        self.facts = facts
        self.log = log
        self.clock = clock
        self.first_step = 0
        self.best = None  # the checkpoint of the best validation
        self.came_from = []  # folders RUN_ID.saved of the runs that this one goes on with
        if run_files.saved:
            self.go_on(run_files.saved)
        self.run_id = all_ranks(facts.run["run_id"])[0]
        self.saver = saving.Saver(
            Path(c.log_dir, f"{self.run_id}.saved"), c.save_every, c.save_steps, self.tensors(),
            self.came_from, clock.total, self.first_step)

    # ----------------------------------------------------------------------------------------------
    # Saves

    def go_on(self, saved: saving.Saved) -> None:
        """Begins where the save was made. Raises BadInput if it does not fit. A collective."""
        on_all_ranks(saved.restore, self.optimizer)
        self.first_step = saved.step
        self.best = saved.fact("best") if self.weights_file else None
        self.came_from = saved.history()
        self.clock.total = saved.fact("seconds")
        self.log.repeat(saved.fact("steps"))

    def tensors(self) -> dict:
        """This rank's tensors of a save (nanogpt/saving.py)."""
        of_model = saving.tensors_of_model(self.model)
        return saving.tensors_of_optimizer(self.optimizer) | of_model

    def due(self, step: int) -> bool:
        """Whether rank 0 wants a save now. The other ranks, on which this is False, hear of it
        (`ranks.Requests`)."""
        return self.saver.due(step, self.clock.now())

    def save(self, step: int) -> None:
        """Begins a save, if the run is one that saves. The log must have all losses so far, as
        `Run.read_messages` brings them. Raises BadInput if a number is not finite. A collective."""
        if not self.saver.saves:
            return
        tensors = self.tensors()
        finite.check_save(step, tensors)
        optimizer = self.optimizer
        shared = dict(  # what rank 0 saves for all
            config=dataclasses.asdict(self.config), run_id=self.run_id,
            files_sha256=self.facts.run["files_sha256"],
            data=self.facts.data, came_from=self.came_from, best=self.best,
            checkpoint=self.weights_file and str(self.weights_file), seconds=self.clock.now(),
            steps=list(self.log.steps), updates=optimizer.updates,
            bytes_sent=optimizer.bytes_sent, recipes=optimizer.recipes.state())
        random = saving.random_state(self.model.signs.device)
        self.saver.save(step, self.clock.now(), tensors, random, shared)

    # ----------------------------------------------------------------------------------------------
    # The best weights

    def weights_now(self, step: int, val_loss: float) -> dict:
        """The checkpoint of the weights as they are now."""
        origin = dict(run_id=self.run_id, data=self.facts.data)
        return checkpoint.of_model(self.model, step, val_loss, origin)

    def validated(self, step: int, loss: float) -> None:
        """Keeps these weights if they are the best so far, and were trained."""
        is_best = self.best is None or loss < self.best["val_loss"]
        if self.weights_file and step and is_best:
            self.best = self.weights_now(step, loss)

    def own_runs(self) -> list[str] | None:
        """The runs whose file the weights may replace. With --save_checkpoint=auto the name was
        chosen at the start. If a foreign run has since written a file of that name, the weights get
        the next free one, NAME-2.pt. A name that the user gave is always written to (None)."""
        if self.config.save_checkpoint != "auto":
            return None
        return [self.run_id, *(Path(folder).stem for folder in self.came_from)]

    def keep_best(self, writing, kind: type | None, error: BaseException | None, trace) -> None:
        """Writes the checkpoint if an error ends the run, and holds the lock `writing` meanwhile
        (watch.py). `train` in train_gpt.py pushes this on an ExitStack, which gives the other
        arguments: those of __exit__ of a context manager."""
        if error and self.best and not self.log.has_ended:
            with writing:
                self.log.console.say(checkpoint.keep(
                    self.weights_file, self.best, self.own_runs()))

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

    def write_result(self, result: dict) -> Path | None:
        """Ends the log with the result, and writes the best weights. Returns their path, if there
        are any. Raises OSError or BadInput if they cannot be written."""
        log = self.log
        for note in self.optimizer.recipes.notes():
            log.fact("note", note)
        log.fact("note", f"{self.optimizer.bytes_per_step()} bytes sent per step and rank")
        lost = int(self.model.lost_targets)
        if lost:
            log.fact("defect", dict(
                what=f"{lost} targets were no candidates; raise --candidates"))
        log.end(result)
        if not self.best:
            return None
        return checkpoint.write_somewhere(self.weights_file, self.best, self.own_runs())

    def say_how_to_go_on(self, step: int, signal: str, path: Path | None) -> int:
        """Says what is left of a run that a signal has ended, and how to go on. `path` is that of
        its weights, if there are any. Returns the exit status."""
        if self.weights_file and not path:
            self.log.console.say("no weights are kept, as none were validated after a step")
        self.saver.finish()
        command = saving.command(self.saver.newest(), self.config.save_checkpoint)
        self.log.console.stopped(signal, step, command, self.saver.saves)
        return stopping.status_of(signal)
