"""The batch of a step, shared out: over the ranks, over groups that have their candidates in common
(candidates.py), and over micro-batches, which a rank trains on one after the other.

`c` is a train_gpt.Config, and a count is a number of sequences, each of c.seq_len tokens.
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
    sequences: Tensor  # of all ranks, (n, seq_len + 1), int16 with the bits of uint16, on the CPU
    micro_batches: Sequence[slice]  # those of this rank
    groups: Sequence[slice]  # those of all ranks, each with candidates of its own
    groups_of: Sequence[slice]  # which groups each micro-batch is made of, or the one it is part of


def tokens_of(sequences: Tensor, device: torch.device) -> Tensor:
    """int16 with the bits of uint16 -> int64 on the device."""
    return sequences.to(device, non_blocking=True).long() & 0xFFFF


def inputs_and_targets(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences (n, length + 1) -> inputs and targets, (n * length,) each."""
    return tokens[:, :-1].flatten(), tokens[:, 1:].flatten()


def group_sequences(count: int, c) -> int:
    """How many sequences are a group, if each rank has `count` of a batch. Without candidates all
    sequences of the batch are one."""
    whole = count * rank_and_world_size()[1]
    over_candidates = 0 < c.candidates < c.vocab_size
    return min(max(1, GROUP_TOKENS // c.seq_len), whole) if over_candidates else whole


def micro_sequences(count: int, c) -> int:
    """How many of a rank's `count` sequences are a micro-batch: the largest number that
    --micro_tokens allows, and that divides `count`. It is made of whole groups, or is an equal part
    of one."""
    most = min(c.micro_tokens // c.seq_len, count)
    in_group = group_sequences(count, c)
    return max(n for n in range(1, most + 1)
               if count % n == 0 and (n % in_group == 0 or in_group % n == 0))


def rank_batches(arrays: Iterable[np.ndarray], c, device: torch.device) -> Iterator[Batch]:
    """The batch of each step, (sequences, seq_len + 1) uint16, as this rank works on it. The ranks
    have equal parts of it, one after the other. Each rank gets all of it, as it draws the
    candidates of all groups."""
    rank, world_size = rank_and_world_size()
    for array in arrays:
        sequences = torch.from_numpy(array.view(np.int16))
        if device.type == "cuda":
            sequences = sequences.pin_memory()  # so that nothing waits for its copy
        count = len(sequences) // world_size
        in_micro_batch = micro_sequences(count, c)
        in_group = group_sequences(count, c)
        micro_batches = cut(rank * count, (rank + 1) * count, in_micro_batch)
        groups_of = [slice(micro_batch.start // in_group, (micro_batch.stop - 1) // in_group + 1)
                     for micro_batch in micro_batches]
        yield Batch(sequences, micro_batches, cut(0, len(sequences), in_group), groups_of)


def cut(begin: int, end: int, length: int) -> list[slice]:
    """The numbers from `begin` to `end`, cut into pieces of this length."""
    return [slice(i, i + length) for i in range(begin, end, length)]
