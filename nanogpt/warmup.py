"""Before the clock starts, everything that a run will need is compiled and run once.

None of it counts as training, so it reads no training data: it works on random documents. The
weights change meanwhile; the trainer draws them anew afterwards.
"""
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nanogpt.batches import Batch, cut, group_sequences, inputs_and_targets, micro_sequences
from nanogpt.gpu import call_directly, to_device
from nanogpt.planning import check_tokens, fit_to_minutes
from nanogpt.ranks import all_ranks, on_all_ranks, rank_and_world_size
from records import journal


class StagePlan(NamedTuple):
    """What the warm-up must know of a stage of the schedule."""
    num_steps: int
    last_step: int  # which has the setting of all its steps
    micro_batches: int  # of a rank, in each step
    length: int  # tokens of a micro-batch
    groups: int  # that a micro-batch is made of; 1 if it is a part of one


class WarmUp:
    def __init__(self, model, optimizer, script):
        """`model` and `optimizer` are train_gpt.GPT and Optimizer, and `script` is the module."""
        self.model = model
        self.optimizer = optimizer
        self.script = script
        self.config = c = model.config
        _, world_size = rank_and_world_size()
        self.plan = plan = []  # the stages that have steps
        for first, end, stage in script.stages(c):
            count = script.stage_tokens(stage, c) // c.seq_len // world_size
            together = micro_sequences(count, c)
            groups = max(1, together // group_sequences(count, c))
            if end > first:
                plan.append(StagePlan(
                    end - first, end - 1, count // together, together * c.seq_len, groups))
        length = max(c.val_seq_len, *(stage.length for stage in plan)) + 1
        # Random documents of 600 tokens, so that blocks of attention are seen in full, in part, and
        # not at all. Random tokens are below bos, so only each 600th begins a document.
        self.tokens = torch.randint(0, model.bos, (length,), device=model.device)
        self.tokens[::600] = model.bos

    def run(self, call: Callable) -> None:
        """`call` is gpu.CudaGraphs, or what stands for it. A collective."""
        if rank_and_world_size()[1] > 1:
            self.compile_share()
        # A recipe may leave out updates of the steps below. So all are compiled here, and captured.
        self.update()
        self.update(self.optimizer.call)
        for stage in self.plan:
            step = stage.last_step
            # First without a CUDA graph, which cannot record what is compiled or made at first use.
            self.forward_backward(stage)
            some = self.micro_batches(stage, most=2)  # later ones have the second one's graph
            # Twice if the head is updated every second step: with it and without it.
            for _ in range(1 + self.config.head_every_second):
                self.script.train_step(self.model, self.optimizer, some, step, call)
            if not self.model.flex:  # masks of SDPA have other shapes for each stage's windows
                self.validate(step)
        self.validate(self.config.num_steps)

    def seconds_per_step(self, call: Callable) -> float:
        """How long a step takes on average over the schedule, to be called after `run`. Of each
        stage two steps are timed twice and the shorter time counts, as something else may hold up
        the machine for a moment. A collective."""
        average = 0.0
        for stage in self.plan:
            times = []
            for _ in range(2):
                clock = journal.Clock(self.tokens.device)
                clock.start()
                for _ in range(2):
                    batch = self.micro_batches(stage, stage.micro_batches)
                    self.script.train_step(
                        self.model, self.optimizer, batch, stage.last_step, call)
                clock.stop()
                times.append(clock.total / 2)
            average += min(times) * stage.num_steps / self.config.num_steps
        return max(all_ranks(average))

    def choose_steps(self, call: Callable, train_paths: list[Path]) -> tuple:
        """Under --minutes, after `run`: the configuration with as many steps as there is time for,
        and how many seconds a step takes. The model gets it, too. A collective."""
        seconds = self.seconds_per_step(call)
        script = self.script
        c = fit_to_minutes(
            self.config, script.SCHEDULES[self.config.schedule], train_paths, seconds)
        on_all_ranks(check_tokens, c, script.batch_plan(c), train_paths)
        self.model.config = c
        # A stage that has no step now is no growth of the window, so later rotary tables differ.
        WarmUp(self.model, self.optimizer, script).run(call)
        return c, seconds

    def compile_share(self) -> None:
        """Each rank compiles some graphs first. In `run` it finds those of its host's other ranks
        in the compiler's cache on disk. A collective."""
        rank, world_size = rank_and_world_size()
        of_lengths = {stage.length: stage for stage in self.plan}
        pieces = [partial(self.forward_backward, stage) for stage in of_lengths.values()]
        pieces += [partial(self.validate, self.config.num_steps), self.update]
        for piece, turn in zip(pieces, cycle(range(world_size))):
            if turn == rank:
                piece()
        all_ranks(None)

    def example(self, length: int) -> Tensor:
        """A sequence (1, length + 1)."""
        return self.tokens[None, : length + 1]

    def micro_batches(self, stage: StagePlan, most: int) -> list:
        """Those of one rank, but at most so many."""
        past = self.model.past
        past.follow()
        groups = stage.groups
        count = groups * min(stage.micro_batches, most)
        example = self.example(stage.length // groups).expand(count, -1)
        micro_batches = cut(0, count, groups)
        return past.prepare(Batch(example, micro_batches, cut(0, count, 1), micro_batches))

    def forward_backward(self, stage: StagePlan) -> None:
        inputs, targets = inputs_and_targets(self.example(stage.length))
        reading = self.model.past.read(inputs, training=True)
        candidates = self.model.candidates
        targets = candidates.of(targets, candidates.draw([*targets.chunk(stage.groups)], step=0))
        setting = self.script.setting_of(stage.last_step, self.config)
        self.script.forward_backward(self.model, setting, *targets, *reading)
        self.model.zero_grad()

    def validate(self, step: int) -> None:
        sequence = self.example(self.config.val_seq_len)
        inputs, targets = inputs_and_targets(sequence)
        setting = self.script.setting_of(step, self.config)
        self.script.loss_without_gradient(self.model, inputs, targets, setting)

    def update(self, call: Callable = call_directly) -> None:
        optimizer = self.optimizer
        rates = to_device([*optimizer.rates(0.0).values()], self.tokens.device)
        for group in optimizer.groups:
            zeros = [torch.zeros_like(optimizer.parts[name]) for name in group]
            gradients = map(optimizer.hooks.unscale, zeros)  # in the dtype that a step has
            call(group, partial(optimizer.update, group), (rates, *gradients))
