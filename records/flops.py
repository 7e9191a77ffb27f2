"""How fast a log says that its machine computed, and whether that can be.

The model's multiplications follow from the configuration and from two places of the embedded code:
the function that counts the head, and in older code the list of layers (TOPOLOGIES). Both are read
as text; nothing is executed. Where the code has another form, its multiplications are not known,
and only those checks are left that need none.
"""
import ast
import re
from functools import lru_cache

from .devices import PEAK_FLOPS
from .log import Refused, shown

LONGEST = 20_000  # bytes of the list of layers, or of the function
LAYERS = re.compile(rb"\nTOPOLOGIES\b[^\n{]*(\{\n.*?\n\})", re.DOTALL)
COUNTS = re.compile(rb"\ndef (?:mfu|flops_per_token)\(.*?(?=\n\S)", re.DOTALL)
SIZES = ("model_dim", "mlp_dim", "vocab_size")


def peak_flops(log):
    """Of one device of this log, or None for a device that is not in the table."""
    name = log.environment["devices"][0]
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def has_attention(call):
    """Whether a layer, written as Layer(...), has attention: all have but for Layer(attn=False)."""
    for word in call.keywords:
        if word.arg == "attn":
            return bool(ast.literal_eval(word.value))
    return True


def layers_of(items):
    """[whether it has attention] of each layer in a list of Layer(...) and *[Layer(...)] * 4."""
    layers = []
    for item in items:
        if isinstance(item, ast.Call):
            layers.append(has_attention(item))
        else:
            product = item.value
            layers += layers_of(product.left.elts) * min(ast.literal_eval(product.right), 1000)
        if len(layers) > 1000:
            raise ValueError("more layers than a model has")
    return layers


def excerpt(source, pattern, start):
    """The match of a pattern in the code at the first place that begins with `start`, or None."""
    at = source.find(start)
    if at < 0:
        return None
    return pattern.match(source[at:at + LONGEST])


@lru_cache(maxsize=64)
def topologies(source):
    """{name: layers} as TOPOLOGIES has them; empty if it has another form."""
    found = excerpt(source, LAYERS, b"\nTOPOLOGIES")
    if not found:
        return {}
    try:
        table = ast.parse(found[1].decode(), mode="eval").body
        return {ast.literal_eval(key): layers_of(value.elts)
                for key, value in zip(table.keys, table.values)}
    except (AttributeError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return {}  # any form but the one above


def flops_per_token(log):
    """What the code of this log counts: 6 for each weight that a token is multiplied by. None if
    that cannot be read from the code and the configuration."""
    config = log.config
    source = b"\n" + b"\n".join(log.files.values())
    number = config.get("num_layers")
    if type(number) is int:
        layers = [True] * min(number, 1000)  # each one has attention
    else:  # older code
        topology = config.get("topology")
        layers = topologies(source).get(topology) if isinstance(topology, str) else None
    count = (excerpt(source, COUNTS, b"\ndef flops_per_token(")
             or excerpt(source, COUNTS, b"\ndef mfu("))
    if not layers or not count:
        return None
    if not all(type(config.get(key)) is int for key in SIZES):
        return None
    width, inner, rows = (config[key] for key in SIZES)
    if b"c.candidates" in count[0]:  # older code counts the whole head
        candidates = config.get("candidates")
        if type(candidates) is not int:
            return None
        rows = min(candidates or rows, rows)
    heads = width  # in older code all heads together are as wide as the model
    if "head_dim" in config:
        if not all(type(config.get(key)) is int for key in ("num_heads", "head_dim")):
            return None
        heads = config["num_heads"] * config["head_dim"]
    attention = sum(layers) * 4 * width * heads
    perceptrons = len(layers) * 2 * width * inner
    return 6 * (attention + perceptrons + rows * width)


def refuse_impossible(log):
    """Raises Refused if `mfu` does not follow from tokens, time, model and device, or if the GPUs
    would have multiplied faster than they did when they were calibrated."""
    end = log.end
    peak = peak_flops(log)
    flops = flops_per_token(log)
    seconds = end["train_time_s"]
    if not seconds:
        raise Refused(f"{log.path}: expected a training time above zero, found train_time_s: "
                      f"{seconds}.")
    tokens_per_s = end["tokens"] / seconds / log.environment["world_size"]
    if flops and peak and end["mfu"] is not None:
        expected = flops * tokens_per_s / peak
        slack = 0.000051 + expected * 0.00051 / seconds  # printed to 4 digits and to 1 ms
        if abs(end["mfu"] - expected) > slack:
            raise Refused(
                f"{log.path}, line {log.end_line['mfu']}: expected mfu to be {expected:.4f} "
                f"({flops:,} FLOPs a token x {tokens_per_s:,.0f} tokens/s per device, of "
                f"{peak:.4g}), found {end['mfu']}.")
    if flops is None and peak and end["mfu"] is not None:
        flops = end["mfu"] * peak / tokens_per_s
    refuse_too_fast(log, flops, tokens_per_s)


def refuse_too_fast(log, flops, tokens_per_s):
    """Raises Refused if a device multiplied faster than in the calibration of the same run. A CPU
    is left out: it may multiply in float32, which is not calibrated."""
    device = log.environment["devices"][0]
    measured = [log.calibration[key] for key in ("bf16_matmul_tflops", "fp8_matmul_tflops")]
    measured = [speed for speed in measured if speed]
    if flops is None or not measured or device == "CPU":
        return
    needed = flops * tokens_per_s / 1e12
    if needed > max(measured):
        line = log.end_line["tokens_per_s"]
        raise Refused(f"{log.path}, line {line}: expected at most {max(measured):g} TFLOPS per "
                      f"device (the calibration of {shown(device)}), found tokens and time that "
                      f"need {needed:.4g}.")
