"""Candidates: the tokens that a training loss is computed over (train_gpt.py, section 5).

Their biases make the sum of exponentials right on average. The gradient divides one such sum by
another, and such a quotient is slightly off on average, less so with more candidates. This is a
sampled softmax (Bengio and Senecal 2008).

Every rank draws those of all groups, by the seed and the step. So the candidates are the same on
any number of GPUs of one kind, and the ranks need not tell each other what they have counted.

A small group has fewer targets among its candidates, so more candidates are drawn at random; and
with small groups they are drawn anew more often. Of the sizes that were tried, none was clearly
better for its time than 8,192 candidates for each 16,384 tokens (records/long_runs.md).
"""
from typing import NamedTuple

import torch
from torch import Tensor

GROUP_TOKENS = 16_384


class Drawn(NamedTuple):
    """The n candidates of each group of a batch. All are empty, (0,), without candidates."""
    chosen: Tensor  # (groups, n)
    bias: Tensor  # (groups, n), the logarithm of how many tokens each one stands for
    place_of_token: Tensor  # (groups, V), the place of each token among them, -1: none
    counts: Tensor  # (V,), how often each token is a target in the batch
    lost: Tensor  # (), how many targets of the batch are no candidates


class Targets(NamedTuple):
    """What a micro-batch of T tokens is to predict. It is made of groups of one size, or is a part
    of one. Where the loss is over the whole vocabulary, all but `next_tokens` are empty, (0,)."""
    next_tokens: Tensor  # (T,) int64, what comes next at each position
    chosen: Tensor  # (groups, n), the candidates of each group
    bias: Tensor  # (groups, n), as in Drawn
    place_of_token: Tensor  # (groups, V), as in Drawn


class Candidates:
    """Draws candidates, and counts how often each token was a target, the same on all ranks."""

    def __init__(self, number: int, vocab_size: int, device: torch.device):
        # 0: the loss is over the whole vocabulary, and nothing is drawn or counted
        self.number = number if number < vocab_size else 0
        self.generator = torch.Generator(device)
        self.seed = 0
        self.target_counts = torch.zeros(vocab_size, device=device)
        self.lost_targets = torch.zeros((), device=device)  # how many were no candidates

    def reset(self, seed: int) -> None:
        self.seed = seed
        self.target_counts.zero_()
        self.lost_targets.zero_()

    def random_numbers(self, groups: int, step: int) -> Tensor:
        """The numbers by which a step's candidates are drawn: (groups, V) in [0, 1), or (0,)."""
        if not self.number:
            return self.target_counts[:0]
        # A prime apart, so that two seeds seldom draw the same. (A CPU's generator takes 32 bits.)
        self.generator.manual_seed((self.seed * 1_000_003 + step) % 2**32)
        shape = groups, len(self.target_counts)
        return torch.rand(shape, generator=self.generator, device=self.target_counts.device)

    @torch.no_grad()
    def draw(self, targets: Tensor, group_tokens: int, uniform: Tensor) -> Drawn:
        """targets (T,) of a whole batch, which is cut into groups of so many tokens, and random
        numbers for them -> their candidates. Changes nothing: `remember` takes the targets in."""
        if not self.number:
            return Drawn(*[uniform] * len(Drawn._fields))
        group = torch.arange(len(targets), device=targets.device) // group_tokens  # (T,)
        cell = group * uniform.size(1) + targets  # of `here`, counted through
        here = torch.zeros_like(uniform)  # how often each token is a target in each group
        here.view(-1).index_add_(0, cell, torch.ones_like(targets, dtype=here.dtype))
        counts = self.target_counts + here.cumsum(0)  # with those of the groups before
        chosen, bias, place_of_token = choose(self.number, here > 0, counts, uniform)
        lost = (here * (place_of_token < 0)).sum()
        return Drawn(chosen, bias, place_of_token, here.sum(0), lost)

    def remember(self, drawn: Drawn) -> None:
        """Takes in the targets of a batch."""
        if self.number:
            self.target_counts += drawn.counts
            self.lost_targets += drawn.lost


def choose(number: int, is_target: Tensor, counts: Tensor,
           uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Priority sampling (Duffield et al. 2007), for each group. is_target (groups, V) bool; counts
    (groups, V), how often each token was a target so far, these targets included; uniform
    (groups, V), random numbers in [0, 1) -> chosen, bias and place_of_token of Drawn, for `number`
    candidates. A target is none of them only if more than `number` tokens are targets.

    A token's size is sqrt(count + 1), and its priority is size / u with u uniform in (0, 1). The
    tokens of highest priority are chosen. Let `threshold` be the highest priority of those left
    out. A token is chosen if size / u > threshold, which has the probability min(1, size /
    threshold). One that is chosen once in four times stands for four: in general, for 1 /
    probability, which is max(1, threshold / size). Targets get a size that makes them certain.

    Why the root: the sum of exponentials varies least if a token's size is the root of its mean
    squared probability. Suppose that a token is probable only in a few places, about as many as its
    count. Then its mean squared probability grows in proportion to the count. With the count itself
    as the size 137M tokens ended 0.006 higher (two seeds, records/long_runs.md)."""
    certain = 1e30
    size = torch.where(is_target, certain, (1 + counts).sqrt())
    uniform = uniform.clamp(min=2.0**-25)  # 0 would make a token as certain as a target
    # Targets get equal priorities: then each stands for one token, even if some are left out.
    priority = (size / uniform).clamp(max=certain)
    chosen = priority.topk(number, sorted=False).indices  # (groups, number)
    threshold = priority.scatter(1, chosen, 0.0).amax(1, keepdim=True)
    stands_for = (threshold / size.gather(1, chosen)).clamp(min=1)
    places = torch.arange(number, device=chosen.device).expand_as(chosen)
    place_of_token = torch.full_like(is_target, -1, dtype=torch.int64).scatter(1, chosen, places)
    return chosen, stands_for.log(), place_of_token
