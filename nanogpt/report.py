"""What a run says of itself when it begins and when it has ended, on the screen and in the log.

`script` is the module train_gpt, and `run` a train_gpt.Run.
"""
import dataclasses
import math
from pathlib import Path

import torch

from nanogpt.ranks import is_rank_0
from records import journal


def begin(log: journal.Log, script, c, facts: journal.RunFacts, weights: Path | None,
          recipe_names, seconds: float | None = None) -> None:
    """Begins the log, and shows what will run. `weights` is the file of the checkpoint, and
    `seconds` is how long the run may take, if that is known."""
    stages = [dict(first_step=first, last_step=end, batch_tokens=script.stage_tokens(stage, c))
              for first, end, stage in script.stages(c) if end > first]
    config = dataclasses.asdict(c)
    log.begin(script.SOURCE, facts, config, stages)
    log.console.header(
        facts.machine, facts.data, config, stages, num_weights(script.parameter_table(c)),
        ", ".join(sorted({*recipe_names.values()})), log.path, weights, seconds)


def end(run, script, startup_s: float) -> int:
    """Says what came of the run, and what to try next. Returns the exit status, which is 0 also if
    the target was missed: that is a result and no crash."""
    c, keeper, log = run.config, run.keeper, run.log
    result = journal.end_block(
        keeper.facts, log.val_loss, c.target_loss, run.step, run.clock.total,
        script.total_tokens(c, run.step), run.device, startup_s)
    if run.ended_by:
        result["interrupted"] = True
    if run.optimizer.hooks.state():
        log.fact("note", f"at the end the recipe has {run.optimizer.hooks.state()}")
    lost = int(run.model.candidates.lost_targets)
    if lost:
        log.fact("defect", dict(what=f"{lost} targets were no candidates; raise --candidates"))
    log.end(result)
    best, untrained, path = keeper.best or (None, None, None)
    if not run.ended_by:
        if best == 0 and not keeper.lacks_weights:
            log.console.say("no weights are kept, as no validation loss is below that of the "
                            f"untrained model, {untrained:.4f}; lower the learning rates")
        keeper.remove_save()
        if is_rank_0() and c.sample and path:
            show_sample(run, script, path)
    log.console.result(log.steps, result, log.path, path, best)
    if run.ended_by:
        return keeper.say_how_to_go_on(run.step, run.ended_by)
    if path:
        log.console.next(path)
    return 0


def show_sample(run, script, path: str) -> None:
    """Continues a text by the best model."""
    import sample  # training alone needs no tokenizer
    c = run.config
    script.STOP.in_steps = False  # all is written, so a signal ends the process at once
    try:
        model = script.load_checkpoint(path, run.device)
        text = "".join(sample.continued(model, c.sample, c.sample_tokens))
    except torch.OutOfMemoryError:
        text = "none, as the GPU has no room for a second model"
    run.log.console.say(f"sample: {text}")
    expected = sample.what_to_expect(
        c, num_weights(script.parameter_table(c))[0], script.total_tokens(c, run.step))
    if expected:
        run.log.console.say(expected)


def num_weights(table: dict) -> tuple[int, int]:
    """How many weights are active in every token, and how many are in tables, by
    train_gpt.parameter_table."""
    sizes = {True: 0, False: 0}  # of tables, of others
    for param in table.values():
        sizes[param.optimizer == "rows"] += math.prod(param.shape)
    return sizes[False], sizes[True]
