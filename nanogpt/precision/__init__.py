"""Training with narrow numbers. What the formats are, and why a model learns with them, is told in
docs/precision.md.

A projection y = x w^T has three products, each with a sum over another dimension:

    fprop  y  = x w^T     over K, the width of the input
    dgrad  dx = dy w      over N, the width of the output
    wgrad  dw = dy^T x    over T, the tokens

In FP8, inputs and weights become e4m3, and gradients e5m2. In fprop the sums may be quick: Hopper's
"fast accumulation" keeps fewer bits. The errors of gradients would add up over the steps, so their
sums are wide. Every number of FP8 is exact in bf16. Devices without FP8 multiply the same rounded
numbers in bf16 or float32, so the results differ by rounding only.

A recipe is a way to compute a projection: bf16, fp16 (fp16.py), fp32 and fp64 in that dtype,
fp8-static (fp8_static.py), fp8 (fp8.py) and nvfp4 (nvfp4.py). recipe.py says what a recipe can do
and which projection has which, products.py puts those of a model together, and rounding.py rounds
in float32 where hardware lacks a format.
"""
