"""Guesses of the next token: the one that followed when the same last tokens stood earlier in this
document (the induced token), or when they were read in an earlier step of training (the recalled
token).

Texts repeat themselves, so such a guess is often right. Attention can learn to find the first one
("induction heads", Olsson et al. 2022), but only inside its window; and a weight learns from a
single reading only a little. So the model gets both as inputs (after Akyürek et al. 2024 and
Khandelwal et al. 2020).
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogpt.ranks import gathered


class History(NamedTuple):
    """What is computed from the tokens up to each position, without the weights."""
    hashes: Tensor  # (lengths, T), of the last 2, 3, ... tokens
    # (kinds, 2, T). The kinds of match are those in the document, and perhaps those in the training
    # text. found[kind, 0] is the token that came next there, and found[kind, 1] the length.
    found: Tensor


def history(tokens: Tensor, begins: Tensor, table: Tensor, longest_ngram: int,
            recall_lengths: tuple[int, ...]) -> History:
    """tokens and begins (T,), a table of recalled tokens (R,) -> the history of each token. Without
    recall_lengths nothing is recalled."""
    hashes = ngram_hashes(tokens, begins, max((longest_ngram, *recall_lengths)))
    found = [induced_tokens(tokens, begins, hashes[: longest_ngram - 1])]
    if recall_lengths:
        found.append(recalled_tokens(table, hashes, recall_lengths))
    return History(hashes, torch.stack([torch.stack(pair) for pair in found]))


def ngram_hashes(tokens: Tensor, begins: Tensor, longest: int) -> Tensor:
    """tokens and begins (T,) -> (longest - 1, T) int64: for each position the hash of its last 2,
    of its last 3, ... and of its last `longest` tokens. Those before the document or before the
    sequence count as 0."""
    earlier = tokens
    hashed = tokens
    hashes = []
    for _ in range(longest - 1):
        earlier = torch.where(begins, 0, earlier.roll(1))  # one token further back
        hashed = (1_000_003 * hashed + earlier) % (2**31 - 1)  # two primes
        hashes.append(hashed)
    return torch.stack(hashes)


def induced_tokens(tokens: Tensor, begins: Tensor, hashes: Tensor) -> tuple[Tensor, Tensor]:
    """tokens and begins (T,), hashes of their n-grams (G, T) -> for each position its induced token
    and the length of its match, both (T,) int64, and both 0 where there is no match. A match of
    length n is an earlier position in the document (or what the sequence has of it) where the last
    n tokens were the same as here.
    We take the longest one, with n from 1 to 1 + G, and of several the latest. The induced token is
    the one that came next there."""
    # 1. Sort the positions for each n, so that those with equal last tokens stand side by side, in
    # the order of the text. What is sorted begins with the number of the document, so that
    # positions of two documents are never equal.
    identity = begins.cumsum(0) * 2**31 + torch.cat((tokens[None], hashes))  # (1 + G, T)
    order = identity.argsort(dim=1, stable=True)
    in_order = identity.gather(1, order)

    # 2. The position just before in this order is the latest match, if the two are equal.
    is_repeated = F.pad(in_order[:, 1:] == in_order[:, :-1], (1, 0))
    match_in_order = torch.where(is_repeated, order.roll(1, 1), -1)
    latest = torch.empty_like(order).scatter(1, order, match_in_order)  # (1 + G, T)

    # 3. Where n tokens match, n - 1 do, too. So the longest length is the number of matches before
    # the first -1; a match behind it means that hashes are equal by chance.
    length = (latest >= 0).cumprod(0).sum(0)
    match = latest.gather(0, (length - 1).clamp(min=0)[None])[0]
    next_token = tokens.roll(-1)  # wrong for the last position, which is nobody's match
    return torch.where(length > 0, next_token[match], 0), length


# The table of recalled tokens has R entries of 64 bits, which are 0 at first. What came after the
# last n tokens is written to place `hash % R`, for two lengths n. From its highest bits on an entry
# holds
#
#   the step that wrote it | 16 check bits | the next token, 16 bits
#
# Of two entries for one place the larger one stays. So a later step counts, and within a step the
# result does not depend on the order in which the GPU or several ranks write. Different n-grams
# share places. The check bits are from the hash of the last two tokens: if they are the same, the
# entry nearly always is of this n-gram.


def check_bits(hashes: Tensor) -> Tensor:
    """hashes (G, T) of the last 2 and more tokens -> (T,)."""
    return hashes[0] & 0xFFFF


def recalled_tokens(table: Tensor, hashes: Tensor,
                    lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """table (R,), hashes (G, T) -> for each position the token that came next when its last n
    tokens were last read in training, and n, both (T,) int64, and both 0 where no entry is found. n
    is the largest of `lengths`, which ascend, for which there is one."""
    token = torch.zeros_like(hashes[0])
    length = torch.zeros_like(token)
    bits = check_bits(hashes)
    for n in lengths:
        entry = table[hashes[n - 2] % len(table)]
        is_found = (entry > 0) & ((entry >> 16 & 0xFFFF) == bits)
        token = torch.where(is_found, entry & 0xFFFF, token)
        length = torch.where(is_found, n, length)
    return token, length


def remember(table: Tensor, hashes: Tensor, next_tokens: Tensor, lengths: tuple[int, ...],
             step: int) -> None:
    """Writes to the table (R,), in place and on all ranks, which token came next at each position
    of this rank: hashes (G, T), next_tokens (T,). A next token of -1 is none, and is not written.
    `step` is at least 1, so that no entry is 0. A collective."""
    entries = (step << 32) + (check_bits(hashes) << 16) + next_tokens
    entries = torch.where(next_tokens < 0, 0, entries)
    places = [hashes[n - 2] % len(table) for n in lengths]
    of_all = gathered(torch.stack((*places, entries), 1))  # (ranks * T, lengths + 1)
    *places, entries = of_all.unbind(1)
    for place in places:
        table.scatter_reduce_(0, place, entries, "amax")


def is_table(x: Tensor, c) -> bool:
    """Whether x, from a file, can be the table of a train_gpt.Config."""
    if x.dtype != torch.int64 or x.shape != (c.recall_rows,):
        return False
    return bool(((x & 0xFFFF) < c.vocab_size).all())
