"""The batch of a step, which is cut in three ways. Each rank has an equal part of it. This part is
cut into micro-batches, on which the rank trains one after the other. And the whole batch is cut
into groups, each of which has its candidates (candidates.py). A micro-batch is made of whole
groups, or is a part of one.

`c` is a train_gpt.Config. `per_rank` is how many sequences of a batch each rank has, and a sequence
has c.seq_len tokens.
"""
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanogpt.candidates import GROUP_TOKENS
from nanogpt.ranks import rank_and_world_size


class Batch(NamedTuple):
    """The text of a step, and which of its sequences belong together."""
    sequences: Tensor  # of all ranks, (n, seq_len + 1) uint16, on the CPU
    micro_batches: Sequence[slice]  # of this rank: which sequences each of them has
    group_size: int  # how many sequences of the whole batch make a group; the last may be smaller


def inputs_and_targets(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences (n, length + 1) -> inputs and targets, (n * length,) each."""
    return tokens[:, :-1].flatten(), tokens[:, 1:].flatten()


def group_sequences(per_rank: int, c) -> int:
    """How many sequences a group has."""
    whole = per_rank * rank_and_world_size()[1]
    return min(max(1, GROUP_TOKENS // c.seq_len), whole)


def micro_sequences(per_rank: int, c) -> int:
    """How many of a rank's sequences a micro-batch has: the largest number that --micro_tokens
    allows, that divides `per_rank`, and that makes it whole groups or a part of one."""
    most = min(c.micro_tokens // c.seq_len, per_rank)
    in_group = group_sequences(per_rank, c)
    return max(n for n in range(1, most + 1)
               if per_rank % n == 0 and (n % in_group == 0 or in_group % n == 0))


def rank_batches(arrays: Iterable[np.ndarray], c, device: torch.device) -> Iterator[Batch]:
    """The batch of each step, (sequences, seq_len + 1) uint16, as this rank works on it: rank r
    trains on the r-th of equal parts, but reads all of it (`Past.read_batch`)."""
    rank, world_size = rank_and_world_size()
    for array in arrays:
        sequences = torch.from_numpy(array)
        if device.type == "cuda":
            sequences = sequences.pin_memory()  # so that nothing waits for its copy
        per_rank = len(sequences) // world_size
        in_micro_batch = micro_sequences(per_rank, c)
        begins = range(rank * per_rank, (rank + 1) * per_rank, in_micro_batch)
        micro_batches = [slice(begin, begin + in_micro_batch) for begin in begins]
        yield Batch(sequences, micro_batches, group_sequences(per_rank, c))
