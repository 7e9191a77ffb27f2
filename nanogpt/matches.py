"""What came next where the last tokens stood before: earlier in the document (induced tokens), or
earlier in the training text (recalled tokens).

Texts repeat themselves, so what came next then often comes next now. Attention can learn to find it
("induction heads", Olsson et al. 2022), but only inside its window; and a text that was read long
ago is only in the weights, which need to read a thing several times to know it. So the model is
told (after Akyürek et al. 2024 and, for the training text, Khandelwal et al. 2020).

Below, G is a number of lengths of n-grams, from 2 on.
"""
import torch
import torch.nn.functional as F
from torch import Tensor


def ngram_hashes(tokens: Tensor, begins: Tensor, longest: int) -> Tensor:
    """tokens and begins (T,) -> (longest - 1, T) int64: for each position the hash of its last 2,
    of its last 3, ... and of its last `longest` tokens. Those before the document count as 0."""
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
    length n is an earlier position in the document where the last n tokens were the same as here.
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
    matches = torch.empty_like(order).scatter(1, order, match_in_order)  # (1 + G, T)

    # 3. Where n tokens match, n - 1 do, too. So the longest length is the number of matches before
    # the first -1; a match behind it means that hashes are equal by chance.
    length = (matches >= 0).cumprod(0).sum(0)
    match = matches.gather(0, (length - 1).clamp(min=0)[None])[0]
    next_token = tokens.roll(-1)  # wrong for the last position, which is nobody's match
    return torch.where(length > 0, next_token[match], 0), length


# The table of recalled tokens has R entries of 64 bits, and is empty, all 0, at first. The last n
# tokens have the entry hash % R, which holds from its highest bits on
#
#   the step in which it was written | 16 bits of the hash of the last 2 tokens | the next token
#
# The larger of two entries for one place stays, so that the latest step counts, and the result does
# not depend on the order in which the GPU or several ranks write. Many n-grams share an entry. The
# 16 bits in the middle show nearly always whether the entry is about this one.


def of_last_two(hashes: Tensor) -> Tensor:
    """The 16 bits in the middle of an entry, (T,)."""
    return hashes[0] & 0xFFFF


def recalled_tokens(table: Tensor, hashes: Tensor,
                    lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """table (R,), hashes (G, T) -> for each position the token that came next when its last n
    tokens were read in training, and n, both (T,) int64, and both 0 where nothing is known. n is
    the largest one of `lengths`, which ascend, for which there is an entry."""
    token = torch.zeros_like(hashes[0])
    length = torch.zeros_like(token)
    for n in lengths:
        entry = table[hashes[n - 2] % len(table)]
        is_known = (entry > 0) & ((entry >> 16 & 0xFFFF) == of_last_two(hashes))
        token = torch.where(is_known, entry & 0xFFFF, token)
        length = torch.where(is_known, n, length)
    return token, length


def remember(table: Tensor, hashes: Tensor, next_tokens: Tensor, lengths: tuple[int, ...],
             step: int) -> None:
    """Writes to the table (R,), in place, which token (T,) came next at each position with these
    hashes (G, T). One of -1 is none. step: from 1 on."""
    entries = (step << 32) + (of_last_two(hashes) << 16) + next_tokens
    entries = torch.where(next_tokens < 0, 0, entries)
    for n in lengths:
        table.scatter_reduce_(0, hashes[n - 2] % len(table), entries, "amax")
