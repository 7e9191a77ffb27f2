"""Candidates: the tokens of the vocabulary that a training loss is computed over.

They are all tokens that are a target in the micro-batch, and others that are drawn at random,
frequent tokens more often. A token that is drawn with probability p is seen only in a part p of the
draws. So its exponential counts 1/p times: log(1/p) is added to its logit. The sum of exponentials
over the vocabulary is then right on average. The gradient divides one such sum by another, and such
a quotient is slightly off on average, less so with more candidates. This is a sampled softmax
(Bengio and Senecal 2008).

In two pairs of runs on one H200 training with 16,384 candidates took 13 and 15 % less time for
0.0014 and 0.0007 more loss, which is no more than two seeds differ by
(records/2026-11-22_ladder_candidates, records/TRIED.md).
"""
import torch
from torch import Tensor

from nanogpt.streams import SideStream


class Candidates:
    """Draws the candidates of each micro-batch beside the layers, which do not depend on them: that
    takes about 90 small kernels, 0.22 ms on an H100. Other ranks draw others."""

    def __init__(self, number: int, vocab_size: int, device: torch.device):
        # 0: the loss is over the whole vocabulary, and nothing is drawn or counted
        self.number = number if number < vocab_size else 0
        self.side_stream = SideStream(device)
        self.target_counts = torch.zeros(vocab_size, device=device)  # on this rank, of each token
        self.lost_targets = torch.zeros((), device=device)  # how many were no candidates
        self.drawn = None

    def reset(self) -> None:
        self.target_counts.zero_()
        self.lost_targets.zero_()

    @torch.no_grad()
    def draw(self, targets: Tensor) -> None:
        """Counts the targets (T,), -1: none, and begins to draw candidates for them."""
        self.side_stream.follow()
        with self.side_stream.on():
            known = (targets >= 0).to(self.target_counts.dtype)
            here = torch.zeros_like(self.target_counts).index_add_(0, targets.clamp(min=0), known)
            self.target_counts += here
            self.drawn = choose(targets, here > 0, self.target_counts, self.number)
            places = self.drawn[2]
            self.lost_targets += ((places < 0) & (targets >= 0)).sum()

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `choose` returns for the targets of `draw`, after waiting for it."""
        self.side_stream.join()
        drawn, self.drawn = self.drawn, None
        return drawn


def choose(targets: Tensor, is_target: Tensor, counts: Tensor,
           number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Priority sampling (Duffield et al. 2007). targets (T,), -1: none; is_target (V,) bool; counts
    (V,), how often each token was a target so far, these targets included -> the candidates
    (number,), the logarithm of how many tokens each one stands for (number,), and each target's
    place among the candidates (T,). A place is -1 if there is no target, or if the target was left
    out because more than `number` tokens are targets.

    A token's size is its count plus one, so that each can be drawn, and its priority is size / u
    with u uniform in (0, 1). The tokens of highest priority are chosen. Let t be the highest
    priority of those left out. A token of size s is chosen if s / u > t, which has the probability
    min(1, s / t). A token that is chosen once in four times stands for four: in general, for
    1 / probability, which is max(1, t / s). Targets get a size that is large enough to be
    certain."""
    certain = 1e30
    size = torch.where(is_target, certain, 1 + counts)
    u = torch.rand_like(size).clamp(min=2.0**-25)  # 0 would make a token as certain as a target
    # Targets get equal priorities: then each stands for one token, even if some are left out.
    priority, order = (size / u).clamp(max=certain).topk(number + 1)
    chosen = order[:-1]
    threshold = priority[-1]
    stands_for = (threshold / size[chosen]).clamp(min=1)
    nowhere = order.new_full(counts.shape, -1)  # (V,)
    place_of_token = nowhere.scatter(0, chosen, torch.arange(number, device=order.device))
    place_of_target = torch.where(targets < 0, -1, place_of_token[targets.clamp(min=0)])
    return chosen, stands_for.log(), place_of_target
