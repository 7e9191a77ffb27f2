"""Before the clock starts, everything that a run will need is compiled and run once.

None of it is timed, so it reads no training data: it works on random documents. The weights change
meanwhile; the trainer draws them anew afterwards.
"""
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nanogpt.ranks import all_ranks, rank_and_world_size
from records import journal


class Work(NamedTuple):
    """The functions of train_gpt.py that the warm-up runs."""
    train_step: Callable
    forward_backward: Callable
    loss_without_gradient: Callable
    setting_of: Callable


class StagePlan(NamedTuple):
    """What the warm-up must know of a stage of the schedule."""
    first: int  # its first step
    end: int  # its last step + 1
    micro_batches: int  # of a rank, in each step
    length: int  # tokens of a micro-batch


class WarmUp:
    """`model` and `optimizer` are train_gpt.GPT and Optimizer; `plan` has the stages that have
    steps."""

    def __init__(self, model, optimizer, work: Work, plan: list[StagePlan]):
        self.model = model
        self.optimizer = optimizer
        self.work = work
        self.config = model.config
        self.plan = plan
        length = max(self.config.val_seq_len, *(stage.length for stage in plan)) + 1
        self.tokens = torch.randint(0, model.bos, (length,), device=model.signs.device)
        self.tokens[::600] = model.bos
        self.kinds = []  # a step of each stage, with and without its recipes
        for stage in plan:
            of_stage = {self.setting(step).plain: step for step in range(stage.first, stage.end)}
            self.kinds += [(stage, step) for step in of_stage.values()]

    def run(self, call: Callable) -> None:
        """`call` is compiling.CudaGraphs, or what stands for it."""
        if rank_and_world_size()[1] > 1:
            self.compile_share()
        for stage, step in self.kinds:
            self.forward_backward(stage, step)  # a CUDA graph must not contain a first use
            first_two = self.micro_batches(stage)[:2]  # later ones are like the second
            self.work.train_step(self.model, self.optimizer, first_two, step, call)
            if not self.model.flex:  # the shapes of these masks depend on the windows
                self.validate(step)
        self.validate(self.config.num_steps)

    def seconds_per_step(self, call: Callable) -> float:
        """How long a step takes on average over the schedule. Call it after `run`. A collective."""
        clock = journal.Clock(self.tokens.device)
        average = 0.0
        for stage in self.plan:
            before = clock.total
            clock.start()
            for _ in range(3):
                batch = self.micro_batches(stage)
                self.work.train_step(self.model, self.optimizer, batch, stage.end - 1, call)
            clock.stop()
            of_stage = (clock.total - before) / 3
            average += of_stage * (stage.end - stage.first) / self.config.num_steps
        return max(all_ranks(average))

    def compile_share(self) -> None:
        """Each rank compiles some graphs first. In `run` it finds those of the other ranks in the
        compiler's cache on disk. With empty caches, one H200 alone took 82 s to its first step, and
        four that share took 66 to 76 s."""
        rank, world_size = rank_and_world_size()
        # Those without attention, which compile fastest, go to ranks that have one more to compile.
        layers = sorted(enumerate(self.model.layers), key=lambda item: item[1].attn)
        kinds = {}  # of layers in training and in validation; each has a graph of its own
        val_kinds = {}
        for i, layer in layers:
            kinds[layer.attn, layer.paired, layer.offset, layer.xsa, layer.value_embed is None] = i
            val_kinds[layer.attn, layer.paired] = i
        lengths = {stage.length: (stage, step) for stage, step in self.kinds}
        jobs = [(self.forward_backward, at, list(kinds.values())) for at in lengths.values()]
        jobs.append((self.validate, (self.config.num_steps,), list(val_kinds.values())))
        for turn, (job, at, which) in enumerate(jobs):  # it is never the same rank that has most
            job(*at, only=which[(rank + turn) % world_size :: world_size])
        params = self.model.params
        dense = [name for name in params if name not in self.model.big_tables]
        slowest_first = sorted(dense, key=lambda name: params[name].optimizer != "muon")
        self.update(slowest_first[rank::world_size])
        torch.get_device_module(self.tokens.device).synchronize()
        dist.barrier()

    def setting(self, step: int):
        return self.work.setting_of(step, self.config)

    def example(self, length: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.tokens[:length], self.tokens[1 : length + 1]
        return inputs, targets.clone()  # in memory of their own, as in training

    def micro_batches(self, stage: StagePlan) -> list[tuple[Tensor, Tensor]]:
        """Those of one rank."""
        return [self.example(stage.length)] * stage.micro_batches

    def forward_backward(self, stage: StagePlan, step: int, only: list[int] | None = None) -> None:
        """Of all layers, or of those with the numbers `only`."""
        inputs, targets = self.example(stage.length)
        rows = self.model.table_rows(inputs).values()
        self.work.forward_backward(
            self.model, self.setting(step), inputs, targets, *rows, only=only)
        self.model.zero_grad()

    def validate(self, step: int, only: list[int] | None = None) -> None:
        inputs, targets = self.example(self.config.val_seq_len)
        self.work.loss_without_gradient(
            self.model, inputs, targets, self.setting(step), only)

    def update(self, names: list[str]) -> None:
        for name in names:
            gradient = torch.zeros_like(
                self.optimizer.masters[name], dtype=getattr(self.model, name).dtype)
            self.optimizer.update(name, gradient, 0.0, 0.0)
