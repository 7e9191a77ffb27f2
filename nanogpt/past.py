"""What follows from the tokens of a text alone, without the weights: where documents begin, hashes
of n-grams and the rows of their table, and guesses of the next token. Such a guess is the token
that followed when the same last tokens stood earlier in this document (the induced token), or when
they were read in an earlier step of training (the recalled token). Tokens count as the same if
they differ only in case, accents, or a space before (data/spellings.py).

Texts repeat themselves, so such a guess is often right. Attention can learn to find induced tokens
("induction heads", Olsson et al. 2022), but only inside its window; and a weight learns from a
single reading only a little. So the model gets both as inputs (after Akyürek et al. 2024 and
Khandelwal et al. 2020).
"""
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from data import spellings
from nanogpt.batches import group_sequences, inputs_and_targets, micro_batches
from nanogpt.candidates import Candidates, Drawn, Targets
from nanogpt.gpu import NO_TRANSFER, SideStream, caller, mark
from nanogpt.ranks import rank_and_world_size


class Reading(NamedTuple):
    """What the model reads of T tokens. Rows and guesses that it is configured without are empty,
    (0,)."""
    tokens: Tensor  # (T,) int64
    begins: Tensor  # (T,) bool, where documents begin, and sequences
    hashes: Tensor  # (longest_match - 1, T), of the last 2, 3, ... tokens
    rows_of_ngrams: Tensor  # (G T,), numbers of their rows in the table (record 62 for pairs)
    # What came next where the last tokens stood before, and how many of them were the same there.
    # Both are 0 if they did not stand anywhere before. (T,) each.
    induced_token: Tensor
    induced_length: Tensor
    recalled_token: Tensor
    recalled_length: Tensor

    def rows(self) -> dict[str, Tensor]:
        """The numbers of the rows that are looked up, at the tokens and in the table of n-grams."""
        rows = {"tokens": self.tokens, "ngrams": self.rows_of_ngrams}
        return {at: numbers for at, numbers in rows.items() if len(numbers)}

    def matches(self) -> list[tuple[Tensor, Tensor]]:
        """The guessed tokens and the lengths of their matches, of each kind that there is."""
        kinds = [(self.induced_token, self.induced_length),
                 (self.recalled_token, self.recalled_length)]
        return [(token, length) for token, length in kinds if len(token)]


class UsedRows(NamedTuple):
    """The rows that a step looks up, of one key of Reading.rows()."""
    of_this_rank: Tensor  # those that this rank looks up, ascending
    of_all: Tensor  # (n,) those of any rank, ascending
    of_ranks: Tensor  # those of each rank, one rank after the other
    counts: list[int]  # how many those are of each rank


class PreparedBatch(NamedTuple):
    """The batch of a step, ready to be trained on. T are the tokens of all ranks."""
    micro_batches: list[tuple[Reading, Targets]]  # of this rank
    drawn: Drawn
    hashes: Tensor  # (longest_match - 1, T), as in a Reading
    next_tokens: Tensor  # (T,)
    rows: tuple[Tensor, ...]  # for each key of Reading.rows(): the lists of `distinct_rows`
    ends: Tensor  # (keys of Reading.rows(), ranks + 1), where each list ends; on the CPU
    is_there: object  # the event after which the CPU may read `ends`

    def used_rows(self) -> dict[str, UsedRows]:
        """The rows that the step uses, by the keys of Reading.rows(). The CPU waits until they are
        counted."""
        self.is_there.synchronize()
        rank, _ = rank_and_world_size()
        reading, _ = self.micro_batches[0]
        used = {}
        lists = zip(reading.rows(), self.rows, self.ends.tolist(), strict=True)
        for at, rows, ends in lists:
            # One list after the other: of all ranks, of each rank, and padding.
            of_all, *of_each, _ = rows.tensor_split(ends)
            of_ranks = rows[ends[0] : ends[-1]]
            counts = [len(x) for x in of_each]
            used[at] = UsedRows(of_each[rank], of_all, of_ranks, counts)
        return used


def copied(tensors: NamedTuple) -> NamedTuple:
    """A copy of each tensor. Parts of a batch must be copies, because compiled graphs depend on
    the offset of a tensor in its memory, and on its strides."""
    return tensors._make(x.clone(memory_format=torch.contiguous_format) for x in tensors)


class Past:
    """Reads text for a model, and remembers what came next in it. While the GPU trains on one
    batch, the next one is read on a side stream. In each step:

        meet      before the passes: the main stream and the side stream wait for each other
        remember  beside the first pass: writes down what came next in this batch
        prepare   after that: makes the next batch ready. It is read, its candidates are drawn, and
                  the rows that it looks up are found
        join      after the passes: the main stream waits for `remember` and `prepare`, and then may
                  use what they made

    c: train_gpt.Config; `bos` begins a document; `recall_table` (R,) is the same on all ranks."""

    def __init__(self, c, bos: int, recall_table: Tensor, candidates: Candidates,
                 as_graphs: bool):
        device = recall_table.device
        self.bos = bos
        self.spellings = torch.from_numpy(spellings.of_vocabulary(c.vocab_size)).to(device)
        self.recall_table = recall_table
        self.candidates = candidates
        self.config = c
        self.device = device
        self.side_stream = SideStream(device)
        self.read_calls = [caller(as_graphs), caller(as_graphs)]
        self.kept = None  # the last batch, so that its memory is not given away (`prepare`)
        # Whether `meet` and `remember` were called after the last `prepare`, if there was one.
        self.has_met = False
        self.has_remembered = True

    def read(self, tokens: Tensor, training: bool) -> Reading:
        """The reading of tokens (T,). In training they are sequences of `seq_len`, end to end."""
        return self.reading_of(*self.spell_and_hash(tokens, training))

    def spell_and_hash(self, tokens: Tensor, training: bool) -> tuple[Tensor, ...]:
        """Tokens, where documents begin, and spellings, (T,); hashes (longest_match - 1, T); rows
        of the table of n-grams (G, T), or (0, T) without it."""
        c = self.config
        begins = tokens == self.bos
        begins[:: c.seq_len if training else len(tokens)] = True
        words = self.spellings[tokens]
        hashes = ngram_hashes(words, begins, c.longest_match)
        rows = hashes[: c.longest_ngram - 1] % c.ngram_rows if c.ngram_rows else hashes[:0]
        return tokens, begins, words, hashes, rows

    def reading_of(self, tokens: Tensor, begins: Tensor, words: Tensor, hashes: Tensor,
                   rows: Tensor) -> Reading:
        """What `spell_and_hash` returns, or a part of it with whole sequences -> its reading."""
        c = self.config
        nothing = tokens.new_empty(0)
        induced = recalled = nothing, nothing
        if c.induced:
            last = torch.cat((words[None], hashes[: c.longest_ngram - 1]))
            induced = induced_tokens(tokens, begins, last)
        if c.recall_lengths:
            recalled = recalled_tokens(self.recall_table, hashes, c.recall_lengths)
        return Reading(tokens, begins, hashes, rows.flatten(), *induced, *recalled)

    def reset(self, seed: int) -> None:
        """Forgets all text: what came next in it, and how often each token was a target."""
        self.candidates.reset(seed)
        self.recall_table.zero_()
        self.has_met = False
        self.has_remembered = True

    def meet(self) -> None:
        self.side_stream.meet()
        self.has_met = True

    def join(self) -> None:
        self.side_stream.meet()

    def prepare(self, sequences: Tensor, step: int = 0,
                call: Callable | None = None) -> PreparedBatch:
        """Makes the batch of a step ready: all ranks' sequences, (n, seq_len + 1) uint16 on the
        CPU. `call` runs `read_batch`, hundreds of small kernels: by default as a CUDA graph, if the
        run is compiled for a GPU. (Batches of one size are cut alike, so they share a graph.)

        Batch n + 1 must not get the memory of batch n, which the main stream is reading. So `kept`
        holds batch n until the next one is made, and two callers take turns, as a CUDA graph
        overwrites what it has returned before. But it may get the memory of batch n - 1: in
        `meet` of step n this stream has waited until step n - 1 is over. Raises RuntimeError
        without `meet`, and without `remember`: then batch n + 1 would not find what came next in
        batch n."""
        if not (self.has_met and self.has_remembered):
            raise RuntimeError("`meet` must come before each batch, and `remember` between two")
        self.has_met = self.has_remembered = False
        num_groups = math.ceil(len(sequences) / group_sequences(len(sequences), self.config))
        self.read_calls.reverse()
        with self.side_stream.on():
            sequences = sequences.to(self.device, non_blocking=True)
            uniform = self.candidates.random_numbers(num_groups, step)
            prepared = (call or self.read_calls[0])("batch", self.read_batch, (sequences, uniform))
            self.kept = prepared._replace(
                ends=prepared.ends.to("cpu", non_blocking=True), is_there=mark(self.device))
        return self.kept

    def read_batch(self, sequences: Tensor, uniform: Tensor) -> PreparedBatch:
        """Sequences on the device, and random numbers for candidates -> the batch, with `ends` on
        the device. Every rank reads all of it, so none has to tell the others what it looks up."""
        # 1. What all ranks need to know of all tokens.
        length = sequences.size(1) - 1
        in_group = group_sequences(len(sequences), self.config)
        inputs, targets = inputs_and_targets(sequences.long())
        hashed = self.spell_and_hash(inputs, training=True)
        *_, hashes, rows_of_ngrams = hashed
        drawn = self.candidates.draw(targets, in_group * length, uniform)

        # 2. What this rank reads, in micro-batches.
        pairs = []
        for part in micro_batches(len(sequences), self.config):
            its_tokens = slice(part.start * length, part.stop * length)
            reading = self.reading_of(*[x[..., its_tokens] for x in hashed])
            # The groups that it is made of, or the one that it lies in.
            first_group = part.start // in_group
            last_group = (part.stop - 1) // in_group
            groups = slice(first_group, last_group + 1)
            its_targets = Targets(
                targets[its_tokens], drawn.chosen[groups], drawn.bias[groups],
                drawn.place_of_token[groups])
            pairs.append((copied(reading), copied(its_targets)))

        # 3. The rows that each rank looks up, in the order of Reading.rows().
        _, ranks = rank_and_world_size()
        of_ranks = [inputs.view(ranks, -1)]
        if len(rows_of_ngrams):
            rows = rows_of_ngrams.unflatten(1, (ranks, -1)).transpose(0, 1)  # (ranks, G, T / ranks)
            of_ranks.append(rows.flatten(1))
        rows, ends = zip(*map(distinct_rows, of_ranks))
        return PreparedBatch(pairs, drawn, hashes, targets, rows, torch.stack(ends), NO_TRANSFER)

    def remember(self, batch: PreparedBatch) -> None:
        """Takes in the whole batch of a step, on all ranks the same: counts how often each token
        was a target, and writes to the recall table which token came next after which. But a text
        that is read more than once is not written there, as it would be known by heart. The batch
        itself was prepared before: else it would find its own targets in the table."""
        self.has_remembered = True
        with self.side_stream.on():
            self.candidates.remember(batch.drawn)
            if self.config.epochs == 1 and self.config.recall_lengths:
                write_recall(self.recall_table, batch.hashes, batch.next_tokens,
                             self.config.recall_lengths)


def distinct_rows(lookups_of_ranks: Tensor) -> tuple[Tensor, Tensor]:
    """lookups_of_ranks: (ranks, lookups), the rows that each rank looks up -> lists of these
    without repeats, each ascending, one list after the other: first that of all ranks together,
    then that of each rank. Zeros follow, up to (2 * ranks * lookups,), so that a CUDA graph can
    make them: its tensors always have the same size. And where each list ends: (ranks + 1,).

    The list of all ranks is the first, so that it begins at a multiple of 16 bytes: for others
    Triton would compile the kernel that takes it once more."""
    ranks, lookups = lookups_of_ranks.shape
    # The upper bits of what is sorted are the number of the list.
    numbers = torch.arange(1, ranks + 1, device=lookups_of_ranks.device)[:, None] << 32
    keys = torch.cat((lookups_of_ranks, lookups_of_ranks + numbers)).flatten().sort().values
    is_new = F.pad(keys[1:] != keys[:-1], (1, 0), value=True)
    count = is_new.cumsum(0)  # of different rows up to here
    rows = torch.zeros_like(keys).scatter(0, count - 1, keys & 0xFFFF_FFFF)
    # The list of all ranks was made of ranks * lookups rows, and each of the others of `lookups`.
    return rows, count[ranks * lookups - 1 :: lookups]


def ngram_hashes(words: Tensor, begins: Tensor, longest: int) -> Tensor:
    """Spellings and begins (T,) -> (longest - 1, T) int64: for each position the hash of its last
    2, of its last 3, ... `longest` words. Those before the document or sequence count as 0."""
    earlier = words
    hashed = words
    hashes = []
    for _ in range(longest - 1):
        earlier = torch.where(begins, 0, earlier.roll(1))  # one token further back
        hashed = (1_000_003 * hashed + earlier) % (2**31 - 1)  # two primes
        hashes.append(hashed)
    return torch.stack(hashes)


def induced_tokens(tokens: Tensor, begins: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """tokens and begins (T,), last (N, T) -> for each position its induced token and the length of
    its match, both (T,) int64, and both 0 where there is no match. last[n - 1] is equal at two
    positions if their last n tokens are the same: their number for n = 1, else their hash.

    A match of length n is an earlier position in the document (or what the sequence has of it)
    where the last n tokens were the same as here. We take the longest one, with n from 1 to N, and
    of several the latest. The induced token is the one that came next there."""
    # 1. Sort the positions for each n, so that those with equal last tokens stand side by side, in
    # the order of the text. The upper bits of what is sorted are the number of the document, so
    # that positions of two documents are never equal.
    identity = begins.cumsum(0) * 2**31 + last  # (N, T)
    order = identity.argsort(dim=1, stable=True)
    in_order = identity.gather(1, order)

    # 2. The position just before in this order is the latest match, if the two are equal.
    is_repeated = F.pad(in_order[:, 1:] == in_order[:, :-1], (1, 0))
    match_in_order = torch.where(is_repeated, order.roll(1, 1), -1)
    latest = torch.empty_like(order).scatter(1, order, match_in_order)  # (N, T)

    # 3. Where n tokens match, n - 1 do, too. So the longest length is the number of matches before
    # the first -1; a match behind it means that hashes are equal by chance.
    length = (latest >= 0).cumprod(0).sum(0)
    match = latest.gather(0, (length - 1).clamp(min=0)[None])[0]
    next_token = tokens.roll(-1)  # wrong for the last position, which is nobody's match
    return torch.where(length > 0, next_token[match], 0), length


# The table of recalled tokens has R entries of 32 bits, which are 0 at first. What came after the
# last n tokens is written to place `hash % R`, for each length n. An entry holds
#
#   0 | 15 check bits | the next token, 16 bits
#
# A step first sets the places that it will write to 0. Then of its entries for one place, even
# those of one n-gram, the largest number stays. So entries of this step replace older ones, and
# within a step the result does not depend on the order in which the GPU or several ranks write.
# Different n-grams share places. The check bits are from the hash of the last two tokens: if they
# are the same, the entry nearly always is of this n-gram.
CHECK_BITS = 0x7FFF


def recalled_tokens(table: Tensor, hashes: Tensor,
                    lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """table (R,), hashes (longest_match - 1, T) -> for each position a token that came next in the
    last step that read its last n tokens, and n, both (T,) int64, and both 0 where no entry is
    found. n is the largest of `lengths`, which ascend, for which there is one."""
    token = torch.zeros_like(hashes[0])
    length = torch.zeros_like(token)
    bits = hashes[0] & CHECK_BITS
    for n in lengths:
        entry = table[hashes[n - 2] % len(table)].long()
        is_found = (entry > 0) & (entry >> 16 == bits)
        token = torch.where(is_found, entry & 0xFFFF, token)
        length = torch.where(is_found, n, length)
    return token, length


def write_recall(table: Tensor, hashes: Tensor, next_tokens: Tensor,
                 lengths: tuple[int, ...]) -> None:
    """Writes to the table (R,), in place, which token came next at each position of a step: hashes
    (longest_match - 1, T), next_tokens (T,)."""
    entries = ((hashes[0] & CHECK_BITS) << 16) + next_tokens
    places = torch.stack([hashes[n - 2] for n in lengths]) % len(table)  # (recall lengths, T)
    entries = entries.int().expand_as(places)
    places = places.flatten()
    table.index_fill_(0, places, 0)
    table.scatter_reduce_(0, places, entries.flatten(), "amax")
