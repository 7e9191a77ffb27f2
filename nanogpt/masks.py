"""Which keys a query of attention sees (train_gpt.py, section 3), block by block, for two ways to
compute attention. A block is 128 tokens. Masks are made from the number of each token's document,
(T,) int32, which never falls, and T is a multiple of 128.

On GPUs compiled FlexAttention (record 12) visits only the blocks in which something is seen, and
computes the mask of single elements only where a block is seen in part. It needs lists of blocks.
Otherwise PyTorch's scaled-dot-product attention, or on a CPU in bf16 plain products, compute the
same from the keys that each block of queries can see."""
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from nanogpt.gpu import constant

BLOCK_SIZE = 128  # tokens


def block_lists(documents: Tensor, windows: Tensor) -> tuple[Tensor, ...]:
    """The blocks that FlexAttention visits. documents (T,), windows (W,) in blocks.

    Documents lie one after the other, so what a block of queries sees is a range of blocks of keys,
    which ends with its own. Its own is seen in part, because later tokens are hidden. An earlier
    block is seen in full if its first token and the last query are of the same document, otherwise
    in part. With blocks of 4 tokens:

        document      0 0 0 0   0 1 1 1   1 1 1 1   1 1 1 1   1 1 2 2   (window: 4 or more)
        block            0         1         2         3         4
        block 3 sees              part      all       part
        block 4 sees              part      part      part      part

    A binary search finds each end of a range, and the window shortens it.

    Returns eight tensors, which are four pairs: for each block of queries the blocks of keys that
    it sees in part, and in full; for each block of keys the blocks of queries that see it in part,
    and in full. A pair is the number of such blocks, (W, n), and a list of them, (W, n, n), both
    int32. Only that many entries of a list count. n is the number of blocks."""
    first = documents[::BLOCK_SIZE].contiguous()  # (n,) the document of each block's first token
    last = documents[BLOCK_SIZE - 1 :: BLOCK_SIZE].contiguous()  # (n,) and of its last token
    own = torch.arange(len(first), device=documents.device)  # (n,) the number of each block
    oldest = own - (windows[:, None] - 1)  # (W, n) first block of keys in the window
    newest = own + (windows[:, None] - 1)  # (W, n) last block of queries whose window reaches here

    # Of each block of queries: the first block of keys it sees, and the first it sees in full.
    first_key = torch.searchsorted(last, first).maximum(oldest)
    first_full_key = torch.searchsorted(first, last).minimum(own).maximum(oldest)
    # Of each block of keys: the last block of queries that sees some of it, and the last that sees
    # all of it. The latter ends in the document in which the keys begin.
    last_query = (torch.searchsorted(first, last, right=True) - 1).minimum(newest)
    last_full_query = torch.searchsorted(last, first, right=True) - 1
    last_full_query = last_full_query.maximum(own).minimum(newest)

    def blocks(begin: Tensor, end: Tensor, with_own: int) -> tuple[Tensor, Tensor]:
        """The blocks from begin to end - 1, and before them the own block if with_own is 1."""
        place = own  # 0 to n - 1, here as places in a list
        index = (begin[..., None] + place - with_own).clamp(max=len(own) - 1)
        index = torch.where(place < with_own, own[:, None], index)
        return (end - begin + with_own).int(), index.int()

    keys_in_part = blocks(first_key, first_full_key, 1)
    keys_in_full = blocks(first_full_key, own, 0)
    queries_in_part = blocks(last_full_query + 1, last_query + 1, 1)
    queries_in_full = blocks((own + 1).expand_as(last_full_query), last_full_query + 1, 0)
    return (*keys_in_part, *keys_in_full, *queries_in_part, *queries_in_full)


@torch.no_grad()  # so that training and validation share one compiled graph of the lists
def flex_masks(documents: Tensor, windows: tuple[int, ...],
               make_lists: Callable = block_lists) -> list[BlockMask]:
    """A mask for each window, in blocks. `make_lists` is block_lists, compiled or not."""

    def causal_and_same_document(batch, head, query, key):
        return (query >= key) & (documents[query] == documents[key])

    T = len(documents)
    lists = make_lists(documents, constant(documents.device, windows))
    masks = []
    for i in range(len(windows)):
        of_window = [numbers[i][None, None] for numbers in lists]
        masks.append(BlockMask(
            (T, T), *of_window, (BLOCK_SIZE, BLOCK_SIZE), causal_and_same_document))
    return masks


def sdpa_masks(documents: Tensor, windows: tuple[int, ...]) -> list[Tensor]:
    """For each window, in blocks, which of the keys in it each block of queries sees: a bool tensor
    (n, 1, BLOCK_SIZE, window * BLOCK_SIZE)."""
    masks = []
    queries = documents.view(-1, BLOCK_SIZE, 1)
    for window in windows:
        window = min(window, len(documents) // BLOCK_SIZE)
        earlier = (window - 1) * BLOCK_SIZE  # keys before the block of the queries
        keys = F.pad(documents, (earlier, 0), value=-1)
        keys = keys.unfold(0, earlier + BLOCK_SIZE, BLOCK_SIZE)  # (n, window * BLOCK_SIZE)
        same_document = queries == keys[:, None]
        masks.append(same_document.tril(earlier)[:, None])
    return masks


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q, k, v (T, H, d), a mask of `sdpa_masks` -> attention (T, H, d), with unscaled scores."""
    T, H, d = q.shape
    n, _, _, span = mask.shape
    q = q.view(n, BLOCK_SIZE, H, d).transpose(1, 2)
    k = seen_by_blocks(k, span)  # (n, H, span, d)
    v = seen_by_blocks(v, span)
    if q.is_cuda or q.dtype != torch.bfloat16:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    else:  # on CPUs PyTorch would compute in float32, though products in bf16 are faster
        hidden = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        scores = (q @ k.mT).add_(hidden)  # (n, H, BLOCK_SIZE, span)
        y = scores.softmax(-1) @ v
    return y.transpose(1, 2).reshape(T, H, d)


def seen_by_blocks(x: Tensor, span: int) -> Tensor:
    """x (T, H, d) -> (n, H, span, d), the part of x that each block of queries may see."""
    x = F.pad(x, (0, 0, 0, 0, span - BLOCK_SIZE, 0))
    if x.is_cuda:
        return x.unfold(0, span, BLOCK_SIZE).mT
    # On a CPU the gradient of `unfold` takes longer than that of slices.
    blocks = x.unflatten(0, (-1, BLOCK_SIZE)).transpose(1, 2)  # (n + window - 1, H, BLOCK_SIZE, d)
    window = span // BLOCK_SIZE
    n = len(blocks) - window + 1
    return torch.cat([blocks[i : i + n] for i in range(window)], 2)
