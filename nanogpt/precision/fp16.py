"""fp16 with a loss scale that adapts itself: --precision=fp16. GPUs that have no bf16 also need
--compile=false: validation, Muon's products and the tables are in bf16, which PyTorch's compiler
refuses there.

Why it works. The magnitudes of fp16 reach from 6e-8 to 65504. Weights and activations fit, but many
gradients are smaller than 3e-8 and would become 0. So the loss, and with it all of its gradients,
is multiplied by S before the backward pass, and the summed gradients are divided by S before the
optimizer sees them. S is a power of two, which changes no bit where nothing over- or underflows.

How S is found (the rule of jmp, a JAX library). S starts at 2^15. If some gradient is infinite or
NaN, S was too large: the step is skipped, S is halved, and no weight remembers that step. After
2000 good steps in a row S is doubled, as gradients get smaller while the model learns. The loss of
this trainer is a sum over tokens, but jmp's rule is meant for a mean, so S is divided by the number
of tokens of a sequence, rounded to a power of two.

The ranks agree on whether to skip, as a gradient may have overflowed on one of them only. They look
at gradients that are already summed, because these sums are made in fp16 and may be what overflows.

Sources: Micikevicius et al. 2017, "Mixed precision training"; jmp.DynamicLossScale.
"""
import math
from collections.abc import Callable

import torch
from torch import Tensor

from nanogpt.precision import StepHooks
from nanogpt.ranks import gathered

FIRST_SCALE = 2.0**15
GOOD_STEPS_TO_GROW = 2000  # even, so that the two steps of head_every_second have one scale


class LossScaling(StepHooks):
    """Multiplies the loss by S / tokens, and has those steps skipped whose gradients overflow."""

    def __init__(self, device: torch.device, tokens_per_sequence: int):
        self.tokens = 2.0 ** round(math.log2(tokens_per_sequence))
        # S / tokens, on the device: a CUDA graph cannot read a number of the CPU anew.
        self.factor = torch.zeros((), device=device)
        self.unscale_factor = 1.0  # until there are gradients
        self.reset()

    def reset(self) -> None:
        self.load_state(dict(scale=FIRST_SCALE, good_steps=0, skipped_steps=0))

    def set_scale(self, scale: float) -> None:
        self.scale = scale
        self.factor.fill_(scale / self.tokens)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    def keeps_step(self, summed: Callable[[], list[Tensor]]) -> bool:
        """Also adapts the loss scale. The CPU waits here for the device."""
        are_finite = torch.stack([gradient.isfinite().all() for gradient in summed()])
        finite = bool(gathered(are_finite.float()).all())
        self.unscale_factor = self.tokens / self.scale  # the scale that these gradients have
        self.good_steps += 1
        if not finite:
            self.skipped_steps += 1
            self.good_steps = 0
            self.set_scale(max(self.scale / 2, 1.0))
        elif self.good_steps == GOOD_STEPS_TO_GROW:
            self.good_steps = 0
            self.set_scale(2 * self.scale)
        return finite

    def unscale(self, gradient: Tensor) -> Tensor:
        """The gradient in float32, or wider, divided by the factor of its loss."""
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return gradient.to(wide) * self.unscale_factor

    def state(self) -> dict:
        return dict(scale=self.scale, good_steps=self.good_steps, skipped_steps=self.skipped_steps)

    def load_state(self, state: dict) -> None:
        self.good_steps = state["good_steps"]
        self.skipped_steps = state["skipped_steps"]
        self.set_scale(state["scale"])
