"""Training with narrow numbers. What the formats are, and why a model learns with them, is told in
docs/precision.md.

A projection y = x w^T has three products, each with a sum over another dimension:

    fprop  y  = x w^T     over K, the width of the input
    dgrad  dx = dy w      over N, the width of the output
    wgrad  dw = dy^T x    over T, the tokens

In FP8, inputs and weights become e4m3, with magnitudes from 2^-9 to 448, and gradients e5m2, from
2^-16 to 57344. A tensor is divided by a scale before it is rounded, such that its largest number
(its "amax") is near the end of the format. What is still too large is clamped. In fprop the sums
may be quick: Hopper's "fast accumulation" keeps fewer bits. The errors of gradients would add up
over the steps, so their sums are wide.

A recipe is a way to compute a projection, and has a name:

    bf16, fp16, fp32, fp64   in that dtype, without rounding of our own
    fp8-static               FP8 with constant scales, the recipe of the default run (fp8_static.py)
    fp8                      FP8 with a measured scale for each tensor (fp8.py)
    nvfp4                    numbers of four bits in blocks of 16 (nvfp4.py)

fp16.py has the loss scale that fp16 needs, recipe.py says what a recipe can do and which projection
has which, products.py puts those of a model together, and rounding.py rounds in float32 where
hardware lacks a format.

Every number of FP8 is exact in bf16. Devices without FP8 multiply the same rounded numbers in bf16
or float32. That is slower, and the results differ by rounding only.
"""
