"""The batch of a step, which is cut in three ways. Each rank has an equal part of it. This part is
cut into micro-batches, on which the rank trains one after the other. And the whole batch is cut
into groups, each of which has its candidates (candidates.py). A micro-batch is made of whole
groups, or is a part of one.

`c` is a train_gpt.Config, and `sequences` is how many a whole batch has, each of c.seq_len tokens.
"""
import numpy as np
import torch
from torch import Tensor

from nanogpt.candidates import GROUP_TOKENS
from nanogpt.ranks import rank_and_world_size


def inputs_and_targets(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences (n, length + 1) -> inputs and targets, (n * length,) each."""
    return tokens[:, :-1].flatten(), tokens[:, 1:].flatten()


def group_sequences(sequences: int, c) -> int:
    """How many sequences make a group. The last one may have fewer."""
    return min(max(1, GROUP_TOKENS // c.seq_len), sequences)


def micro_sequences(sequences: int, c) -> int:
    """How many of a rank's sequences a micro-batch has: the largest number that --micro_tokens
    allows, that divides them, and that makes it whole groups or a part of one."""
    _, world_size = rank_and_world_size()
    per_rank = sequences // world_size
    most = min(c.micro_tokens // c.seq_len, per_rank)
    in_group = group_sequences(sequences, c)
    return max(n for n in range(1, most + 1)
               if per_rank % n == 0 and (n % in_group == 0 or in_group % n == 0))


def micro_batches(sequences: int, c) -> list[slice]:
    """Which sequences of a batch each micro-batch of this rank has: rank r trains on the r-th of
    equal parts."""
    rank, world_size = rank_and_world_size()
    per_rank = sequences // world_size
    size = micro_sequences(sequences, c)
    begins = range(rank * per_rank, (rank + 1) * per_rank, size)
    return [slice(begin, begin + size) for begin in begins]


def host_tensor(batch: np.ndarray, device: torch.device) -> Tensor:
    """A batch, (sequences, seq_len + 1) uint16, as a tensor on the CPU, from which a GPU can copy
    it while nothing waits."""
    sequences = torch.from_numpy(batch)
    if device.type == "cuda":
        return sequences.pin_memory()
    return sequences
