"""Training with narrow numbers. What the formats are, and why a model learns with them, is told in
docs/precision.md.

A projection y = x w^T has three products, each with a sum over another dimension:

    fprop  y  = x w^T     over K, the width of the input
    dgrad  dx = dy w      over N, the width of the output
    wgrad  dw = dy^T x    over T, the tokens

In FP8, inputs and weights become e4m3, and gradients e5m2 (nanogpt/kernels.py, sections 1 and 3).
Section 2 of train_gpt.py says what a recipe is.
"""
from collections.abc import Callable, Collection

import torch.nn.functional as F
from torch import Tensor


class Products:
    """The products of a projection, here in the dtype of its operands. Other recipes override some
    of the methods. These objects are arguments of compiled functions.

    `factor`, a learned number, multiplies the projection; 1.0 or None: there is none. Here it
    multiplies the weight, which has fewer elements than the result; in `three_linears`, the
    values."""

    def linear(self, x: Tensor, w: Tensor, factor: Tensor | float | None = None) -> Tensor:
        """x (T, K), w (N, K) -> factor x w^T (T, N)."""
        return F.linear(x, w if factor is None else factor * w)

    def three_linears(self, x: Tensor, weights: Tensor,
                      factor: Tensor | float) -> tuple[Tensor, ...]:
        """x (T, D), weights (3, H d, D), factor (T, 1), repeated for each token, or 1.0 -> queries,
        keys and factor times values, (T, H d) each.

        The factor multiplies the values and not their weights: it grows with the number of steps,
        beyond 12 in a run of 2,180, and such weights would no longer fit constant FP8 scales."""
        stacked = self.linear(x, weights.flatten(0, 1))  # (T, 3 H d)
        queries, keys, values = stacked.view(len(x), 3, -1).unbind(1)
        return queries, keys, factor * values

    def mlp(self, x: Tensor, up: Tensor, down: Tensor, factor: Tensor | float,
            activation: Callable, down_products: "Products") -> Tensor:
        """x (T, D), up and down (D, F) -> factor activation(x up) down^T (T, D). This is called on
        the products of `up`. Those of `down` are given: they may have another recipe."""
        hidden = activation(self.linear(x, up.t()))  # (T, F)
        return down_products.linear(hidden, down, factor)

    def for_rows(self, rows: Tensor) -> "Products":
        """These products for rows (n,) of w: the output head takes those of its candidates."""
        return self


PLAIN = Products()


class StepHooks:
    """The points of a step at which a recipe may act. Here nothing happens at any of them. A model
    has one such object."""
    # Banks whose new weights `weights_changed` gives to all ranks, so that the optimizer must not.
    hands_out: tuple[str, ...] = ()

    def reset(self) -> None:
        """Forgets what training has changed, as the trainer does after its warm-up."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss () whose gradients are to be computed."""
        return loss

    def keeps_step(self, summed: Callable[[], list[Tensor]]) -> bool:
        """Whether to keep this step. `summed` waits for the summed gradients that this rank will
        use, and returns them. Called once in a step, before any `unscale`. A collective."""
        return True

    def unscale(self, gradient: Tensor) -> Tensor:
        """A gradient of the loss itself, given one of the scaled loss."""
        return gradient

    def weights_changed(self, names: Collection[str], masters: dict[str, Tensor]) -> None:
        """Called after the banks of these names have changed. None is a table. `masters` has
        this rank's part of each bank, in float32 or wider. A collective."""

    def before_validation(self) -> None:
        """Makes the banks complete on every rank, as validation uses no recipe. A collective."""

    def state(self) -> dict:
        """For a save and the end of the log: numbers by name, the same on all ranks."""
        return {}

    def load_state(self, state: dict) -> None:
        """Goes on from what `state` has returned."""
