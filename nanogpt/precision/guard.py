"""A guard that says when weights do not fit the constant scales of FP8 any more.

Training clamps weights that are too large, and validation does not. The model learns to live with
that, but validation sees another model: a long run once went wrong that way without a word
(records/long_runs.md). So at each validation the weights that are clamped are counted.
"""
import torch

from nanogpt.batches import inputs_and_targets
from nanogpt.kernels import E4M3
from nanogpt.precision.fp8_static import STATIC

LARGEST_CLAMPED_PART = 0.001


def check(script, model, step: int, log) -> None:
    """Notes a defect in the log, a journal.Log, for each projection too many of whose weights are
    clamped. `script` is the module train_gpt, and `model` a GPT."""
    for projection, part in clamped_parts(script, model).items():
        if part > LARGEST_CLAMPED_PART:
            log.fact("defect", dict(
                what=f"{100 * part:.2g} % of the weights of {projection} are too large for FP8 at "
                f"step {step} and are clamped; lower the learning rates, or raise their scale"))


@torch.no_grad()
def clamped_parts(script, model) -> dict[str, float]:
    """Of each projection with constant scales, which part of its weights is clamped. Learned
    factors multiply those of "o" and "down"."""
    mlp = model.weight("mlp").unflatten(0, (-1, 2))  # (L, 2, D, F)
    qkvo = model.weight("qkvo").unflatten(0, (-1, 4))  # (layers with attention, 4, H d, D)
    factors = {"o": 1.0, "down": 1.0}  # which multiply the weights
    if model.config.scalars:
        factors = dict(zip(script.SCALARS, model.scalars[..., None, None].unbind(1)))  # (L, 1, 1)
        factors["o"] = factors["o"][[*model.config.attends]]
    weights = {
        "qkv": qkvo[:, :3], "o": factors["o"] * qkvo[:, 3], "up": mlp[:, 0],
        "down": factors["down"] * mlp[:, 1], "lm_head": model.weight("lm_head")}
    parts = {}
    for projection, name in model.precision.recipe_names.items():
        if name == "fp8-static":
            limit = torch.finfo(E4M3).max * STATIC[projection].weight_scale
            parts[projection] = (weights[projection].abs() > limit).float().mean().item()
    return parts
