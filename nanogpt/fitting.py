"""A run fitted to a text: what somebody who brings any text should not have to work out.

The record presets are strict: they need a certain amount of text and refuse less. A fitted run
takes what there is. Its preset follows from the kind and the amount of text, its sequences and its
validation from how long the text is, its steps from a budget of minutes or from the text.
"""
import math
from typing import NamedTuple

from nanogpt.masks import BLOCK_SIZE
from nanogpt.ranks import require

# The large model has 114M parameters, and tables of 386M more, which learn a text by heart when
# they read it twice. So it is for texts of at least half a token for each of the 114M.
LARGE_TEXT = 60_000_000  # tokens of GPT-2's vocabulary

MINUTES = 2.0  # the budget if none is given
MOST_EPOCHS = 40  # a small model has learned by then what it can learn from a text
VALIDATIONS = 10  # of a run; after each one the weights are kept if they are the best so far


class Text(NamedTuple):
    """What the shards of a text hold."""

    kind: str  # of tokens: "bytes" or "gpt2"
    train: tuple[int, ...]  # tokens of each training shard
    val: int  # tokens of all validation shards


def preset_for(text: Text, cuda: bool) -> str:
    """The preset that suits a text on this machine."""
    if text.kind == "bytes":
        return "char" if cuda else "laptop"
    return "onepass" if cuda and sum(text.train) >= LARGE_TEXT else "small"


def lengths(text: Text, world_size: int, seq_len: int, batch_tokens: int, micro_tokens: int,
            val_seq_len: int, val_tokens: int) -> dict[str, int]:
    """Sequences, batches and validation that a text has room for, in tokens. The numbers given are
    the most they may be. Raises BadInput if the text is too short for any."""
    # 1. Sequences. A batch lies within one shard and has a sequence for each process.
    shard = max(text.train) - 1  # the last input needs a target, too
    longest = shard // world_size // BLOCK_SIZE * BLOCK_SIZE
    need = world_size * BLOCK_SIZE + 1
    require(longest > 0, f"{shard + 1:,} tokens are too few to train on; {need:,} are needed")
    seq_len = min(seq_len, longest)
    sequences = min(batch_tokens, shard) // seq_len
    sequences = max(1, sequences // world_size) * world_size

    # 2. Validation: whole sequences.
    have = text.val - 1
    require(have >= BLOCK_SIZE,
            f"{text.val:,} tokens are too few to validate on; {BLOCK_SIZE + 1} are needed")
    val_seq_len = min(val_seq_len, have // BLOCK_SIZE * BLOCK_SIZE)
    val_tokens = max(min(val_tokens, have) // val_seq_len, 1) * val_seq_len
    return dict(
        seq_len=seq_len, batch_tokens=sequences * seq_len,
        micro_tokens=max(micro_tokens // seq_len, 1) * seq_len,
        val_seq_len=val_seq_len, val_tokens=val_tokens)


def steps(text: Text, wanted: float, epochs: int, tokens_per_step: float, seq_len: int,
          batch_tokens: int) -> dict[str, int]:
    """The wanted number of steps, or as many as so many readings of the text have. `epochs` becomes
    the number of readings that these steps take."""
    # A batch lies within one shard, so less than a batch at the end of each is not read.
    epoch = 0
    for tokens in text.train:
        sequences = (tokens - 1) // seq_len - (batch_tokens // seq_len - 1)
        epoch += max(sequences, 0) * seq_len
    num_steps = max(1, int(min(wanted, epochs * epoch / tokens_per_step)))
    return dict(
        num_steps=num_steps, epochs=math.ceil(num_steps * tokens_per_step / epoch),
        val_interval=max(1, num_steps // VALIDATIONS))
