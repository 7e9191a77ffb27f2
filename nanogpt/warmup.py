"""Before the clock starts, everything that a run will need is compiled and run once.

None of it counts as training, so no step reads training data: all work on random documents. The
weights change meanwhile; the trainer draws them anew afterwards.
"""
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanogpt.batches import host_tensor, inputs_and_targets, micro_sequences
from nanogpt.gpu import call_directly, to_device
from nanogpt.past import PreparedBatch
from nanogpt.planning import fit_to_minutes
from nanogpt.ranks import all_ranks, on_all_ranks, rank_and_world_size
from records import journal


class WarmUp:
    def __init__(self, model, optimizer, script):
        """`model` and `optimizer` are train_gpt.GPT and Optimizer, and `script` is the module."""
        self.model = model
        self.optimizer = optimizer
        self.script = script
        self.config = c = model.config
        self.batch_plan = script.batch_plan(c)
        # For each stage: how many steps it has, and its last step, which stands for all.
        self.stages = [(end - first, end - 1) for first, end, _ in script.stages(c)]
        # Random documents of 600 tokens, so that blocks of attention are seen in full, in part, and
        # not at all. Random tokens are below bos, so only each 600th begins a document.
        length = max(c.val_seq_len + 1, max(self.batch_plan) * (c.seq_len + 1))
        self.tokens = np.random.default_rng(0).integers(model.bos, size=length, dtype=np.uint16)
        self.tokens[::600] = model.bos

    def run(self) -> None:
        """Compiles and calls all that the run will need. A collective."""
        if self.config.compile and rank_and_world_size()[1] > 1:
            self.compile_share()
        # fp16 may skip the updates of the steps below. So they are compiled and captured here.
        self.update()
        self.update(self.optimizer.call)
        for _, step in self.stages:
            # First without a CUDA graph, which cannot record what is compiled or made at first use.
            self.forward_backward(step)
            # Two micro-batches: all after the first one use the graph of the second. And two steps:
            # the head may be updated in the second one only, and two graphs read batches in turn.
            for _ in range(2):
                some = self.read(step)
                some = some._replace(micro_batches=some.micro_batches[:2])
                self.script.train_step(self.model, self.optimizer, some, step)
            if not self.model.flex:  # masks of SDPA have other shapes for each stage's windows
                self.validate(step)
        self.optimizer.tables.complete()
        self.validate(self.config.num_steps)

    def seconds_per_step(self) -> float:
        """How long a step takes on average over the schedule, to be called after `run`. Of each
        stage two steps are timed twice and the shorter time counts, as something else may hold up
        the machine for a moment. A collective."""
        average = 0.0
        for num_steps, step in self.stages:
            self.read(step)
            # As a run does, a step trains on the batch that `past` has kept, and prepares the next.
            prepare_next = partial(self.model.past.prepare, self.batch(step))
            times = []
            for _ in range(2):
                clock = journal.Clock(self.model.device)
                clock.start()
                for _ in range(2):
                    self.script.train_step(
                        self.model, self.optimizer, self.model.past.kept, step,
                        prepare_next=prepare_next)
                clock.stop()
                times.append(clock.total / 2)
            average += min(times) * num_steps / self.config.num_steps
        return max(all_ranks(average))

    def choose_steps(self, train_paths: list[Path]) -> tuple:
        """Under --minutes, after `run`: the configuration with as many steps as there is time for,
        and how many seconds a step takes. The model gets it, too. A collective."""
        seconds = self.seconds_per_step()
        c = on_all_ranks(fit_to_minutes, self.script, self.config, train_paths, seconds)
        self.model.config = self.model.past.config = c
        # With fewer steps stages may vanish, and rotary tables depend on all windows before.
        WarmUp(self.model, self.optimizer, self.script).run()
        return c, seconds

    def compile_share(self) -> None:
        """Each rank compiles some graphs first. In `run` it finds those of its host's other ranks
        in the compiler's cache on disk. A collective."""
        rank, world_size = rank_and_world_size()
        of_lengths = {micro_sequences(self.batch_plan[step], self.config): step
                      for _, step in self.stages}
        pieces = [partial(self.forward_backward, step) for step in of_lengths.values()]
        pieces += [partial(self.validate, self.config.num_steps), self.update]
        for piece in pieces[rank::world_size]:
            piece()
        all_ranks(None)

    def batch(self, step: int) -> Tensor:
        """A batch of random documents, (sequences, seq_len + 1)."""
        c = self.config
        tokens = self.tokens[: self.batch_plan[step] * (c.seq_len + 1)]
        return host_tensor(tokens.reshape(-1, c.seq_len + 1), self.model.device)

    def read(self, step: int, call: Callable | None = None) -> PreparedBatch:
        self.model.past.reset(self.config.seed)  # maybe the last batch was not remembered
        self.model.past.meet()
        return self.model.past.prepare(self.batch(step), call=call)

    def forward_backward(self, step: int) -> None:
        batch = self.read(step, call_directly)
        self.model.past.remember(batch)
        self.model.past.join()
        reading, targets = batch.micro_batches[0]
        setting = self.script.setting_of(step, self.config)
        self.script.forward_backward(self.model, setting, *targets, *reading)
        self.model.zero_grad()

    def validate(self, step: int) -> None:
        tokens = torch.from_numpy(self.tokens[None, : self.config.val_seq_len + 1])
        inputs, targets = inputs_and_targets(tokens.to(self.model.device).long())
        setting = self.script.setting_of(step, self.config)
        self.script.loss_without_gradient(self.model, inputs, targets, setting)

    def update(self, call: Callable = call_directly) -> None:
        optimizer = self.optimizer
        rates = to_device([*optimizer.rates(0.0).values()], self.model.device)
        for names in optimizer.updated_together:
            zeros = [torch.zeros_like(optimizer.parts[name]) for name in names]
            gradients = map(optimizer.hooks.unscale, zeros)  # in the dtype that a step has
            call(names, partial(optimizer.update, names), (rates, *gradients))
