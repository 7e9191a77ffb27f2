"""A guard that says when weights have outgrown the constant scales of "fp8-static".

Training clamps such weights, and the model learns to live with that, but validation multiplies
plainly and sees another model. A long run once went wrong that way without a word
(records/long_runs.md). Inputs have room: most are normalised.
"""
import torch

from nanogpt.kernels import E4M3
from nanogpt.precision.fp8_static import STATIC

LARGEST_CLAMPED_PART = 0.001


@torch.no_grad()
def check(script, model, step: int, log) -> None:
    """Writes a defect to the log, a journal.Log, for each projection too many of whose weights are
    clamped. `script` is the module train_gpt, and `model` a GPT."""
    mlp = model.weight("mlp").unflatten(0, (-1, 2))  # (L, 2, D, F)
    qkvo = model.weight("qkvo").unflatten(0, (-1, 4))  # (L, 4, H d, D)
    factors = {"o": 1.0, "down": 1.0}  # which multiply the weights
    if model.config.scalars:
        factors = dict(zip(script.SCALARS, model.scalars[..., None, None].unbind(1)))  # (L, 1, 1)
    weights = {
        "qkv": qkvo[:, :3], "o": factors["o"] * qkvo[:, 3], "up": mlp[:, 0],
        "down": factors["down"] * mlp[:, 1], "lm_head": model.weight("lm_head")}
    for projection, name in model.precision.recipe_names.items():
        if name != "fp8-static":
            continue
        limit = torch.finfo(E4M3).max * STATIC[projection].weight_scale
        part = (weights[projection].abs() > limit).float().mean().item()
        if part > LARGEST_CLAMPED_PART:
            log.fact("defect", dict(
                what=f"{100 * part:.2g} % of the weights of {projection} are too large for FP8 at "
                f"step {step} and are clamped; lower the learning rates, or raise their scale"))
