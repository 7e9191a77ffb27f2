"""Products of numbers of few bits: how the trainer computes with them and learns nevertheless.

    recipe.py     what the trainer asks of a recipe, and which recipe where
    static.py     FP8 with constant scales
    fp8.py        FP8 with scales that are measured
    fp16.py       fp16 with a loss scale that adapts itself
    nvfp4.py      numbers of four bits, emulated
    rounding.py   to formats of few bits

Why FP8 works. Tensor cores multiply numbers of eight bits twice as fast as bf16, and memory and
links carry them in half the time. Two things are missing.

The first is range. The format e4m3 (4 bits of exponent, 3 of mantissa) has magnitudes from 2^-9 to
448, and e5m2 from 2^-16 to 57344. So a tensor is divided by a scale before it is rounded, such that
its largest magnitude, its amax, is near the end of the format, and a product is multiplied by the
scales of both operands. What is larger is clamped.

The second is precision. Rounding to e4m3 changes a number by up to 1/16 of it, to e5m2 by up to
1/8. A product sums thousands of such numbers in float32, where most of these errors cancel. Weights
stay wide in the optimizer, because an update is far smaller than the distance between two FP8
numbers, and what products read is rounded from these.

A projection has three products, each a sum over another dimension:
    fprop  y  = x w^T     sums over K, the width of the input
    dgrad  dx = dy w      sums over N, the width of the output
    wgrad  dw = dy^T x    sums over T, the tokens
Inputs and weights need precision more and are in e4m3. Gradients need range more and are in e5m2.

GPUs have FP8 products from compute capability 8.9 on. Every number of these formats is exact in
bf16, so others multiply the same rounded numbers in bf16, and CPUs in float32: the recipe is
emulated, without a gain, and the results differ by rounding only.
"""
