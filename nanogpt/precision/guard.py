"""A guard that says when training and validation compute with different numbers.

Training may multiply narrow numbers, and validation does not. If numbers grow beyond their range,
training clamps them and the model learns to live with that, but validation sees another model. So
at each validation one sequence is computed both ways. In sound runs the losses differ by rounding
alone: by 0.0002 to 0.0021 on one H200, also after 3,740 steps (records/long_runs.md). Inputs and
weights that are clamped are counted, too; gradients are not, as validation has none.
"""
import torch
from torch import Tensor

from nanogpt.past import inputs_and_targets

LARGEST_DIFFERENCE = 0.02  # nats a token
LARGEST_CLAMPED_PART = 0.001


@torch.no_grad()
def compare_products(script, model, sequence: Tensor,
                     step: int) -> tuple[float, dict[str, float]]:
    """A training sequence (1, seq_len + 1), int16 with the bits of uint16 -> its loss by the
    products of training minus that by those of validation, in nats a token, and the part of the
    numbers that is clamped, of each operand with a constant scale."""
    setting = script.setting_of(step, model.config)
    inputs, targets = inputs_and_targets(sequence, model.signs.device)
    functions, flex = model.functions, model.flex
    # Not compiled, so that no graph is made for the length of this one sequence.
    model.functions, model.flex = script.EAGER, False
    try:
        plain = script.loss_without_gradient(model, inputs, targets, setting)
        with model.precision.as_in_training() as clamped:
            as_trained = model(inputs, targets, setting, False)
    finally:
        model.functions, model.flex = functions, flex
    return (as_trained - plain).item() / len(inputs), clamped


def check(script, model, sequence: Tensor, step: int, log) -> None:
    """Writes the difference to the log, and a defect if it is too large, or if too many numbers are
    clamped. `script` is the module train_gpt, `model` a GPT, and `log` a journal.Log."""
    difference, clamped = compare_products(script, model, sequence, step)
    log.fact("note", f"step {step}: products of training give {difference:+.4f} nats against those "
             "of validation")
    if abs(difference) > LARGEST_DIFFERENCE:
        log.fact("defect", dict(
            what=f"at step {step} the products of training give a loss that differs by "
            f"{difference:+.4f} from validation's; try --precision=bf16"))
    for operand, part in clamped.items():
        if part > LARGEST_CLAMPED_PART:
            log.fact("defect", dict(
                what=f"{100 * part:.2g} % of the {operand} are too large for FP8 at step {step} "
                "and are clamped; lower the learning rates, or raise its scale"))
