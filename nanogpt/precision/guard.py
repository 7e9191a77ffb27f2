"""A guard that says when training and validation compute with different numbers.

Training may multiply narrow numbers, and validation does not. If numbers grow beyond their range,
training clamps them and the model learns to live with that, but validation sees another model: a
long run once went wrong that way without a word (records/long_runs.md). So at each validation one
sequence is computed both ways. In sound runs the losses differ by rounding alone, by 0.0036 at
most. Weights that are clamped are counted, too.
"""
import torch
from torch import Tensor

from nanogpt.batches import inputs_and_targets
from nanogpt.kernels import E4M3
from nanogpt.precision.fp8_static import STATIC
from nanogpt.precision.recipe import PLAIN_DTYPES

LARGEST_DIFFERENCE = 0.02  # nats a token
LARGEST_CLAMPED_PART = 0.001


@torch.no_grad()
def check(script, model, sequence: Tensor, step: int, log) -> None:
    """Notes in the log, a journal.Log, by how much the losses of a training sequence (1, seq_len +
    1) differ, with the bits of uint16, and a defect if that is too much or for a projection too
    many of whose weights are clamped. `script` is the module train_gpt, and `model` a GPT."""
    if set(model.precision.recipe_names.values()) <= set(PLAIN_DTYPES):
        return
    difference = loss_difference(script, model, sequence, step)
    log.fact("note", f"step {step}: products of training give {difference:+.4f} nats against those "
             "of validation")
    if abs(difference) > LARGEST_DIFFERENCE:
        log.fact("defect", dict(
            what=f"at step {step} the products of training give a loss that differs by "
            f"{difference:+.4f} from validation's; try --precision=bf16"))
    for projection, part in clamped_parts(script, model).items():
        if part > LARGEST_CLAMPED_PART:
            log.fact("defect", dict(
                what=f"{100 * part:.2g} % of the weights of {projection} are too large for FP8 at "
                f"step {step} and are clamped; lower the learning rates, or raise their scale"))


def loss_difference(script, model, sequence: Tensor, step: int) -> float:
    """The loss by the products of training minus that by those of validation, nats a token."""
    setting = script.setting_of(step, model.config)
    inputs, targets = inputs_and_targets(sequence, model.signs.device)
    functions, flex = model.functions, model.flex
    # Not compiled, so that no graph is made for the length of this one sequence.
    model.functions, model.flex = script.EAGER, False
    gpus = [0] if inputs.is_cuda else []
    try:
        with torch.random.fork_rng(gpus):  # for recipes that round at random
            plain = script.loss_without_gradient(model, inputs, targets, setting)
            model.precision.validates_plainly = False
            as_trained = model(inputs, targets, setting, False)
    finally:
        model.precision.validates_plainly = True
        model.functions, model.flex = functions, flex
    return (as_trained - plain).item() / len(inputs)


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
