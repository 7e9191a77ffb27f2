"""Training with narrow numbers.

Nearly all the work of training is matrix products, and hardware multiplies narrow numbers faster:
FP8 twice as fast as bf16, FP4 up to four times as fast. Narrow numbers lack two things.

They lack range. e4m3 (4 bits of exponent, 3 of mantissa) has magnitudes from 2^-9 to 448, e5m2 from
2^-16 to 57344. So a tensor is divided by a scale before it is rounded, such that its largest number
(its "amax") is near the end of the format, and the product is multiplied by the scales of both
operands. What is still too large is clamped.

They lack precision. Rounding changes a number by up to 1/16 in e4m3 and 1/8 in e5m2. These errors
average out when a product adds up thousands of numbers, as long as the sum is wide. Weights are
different: an update is far smaller than the distance of two neighbours in e4m3, so the optimizer
keeps them in float32, and what products read is rounded from these.

A projection y = x w^T has three products, each with a sum over another dimension:

    fprop  y  = x w^T     over K, the width of the input
    dgrad  dx = dy w      over N, the width of the output
    wgrad  dw = dy^T x    over T, the tokens

Inputs and weights need precision more and become e4m3. Gradients need range more and become e5m2.
In fprop the sums may be quick: Hopper's "fast accumulation" keeps fewer bits. The errors of
gradients would add up over the steps, so their sums are wide.

A recipe is a way to compute a projection, and has a name:

    bf16, fp16, fp32, fp64   in that dtype, without rounding of our own
    fp8-static               FP8 with constant scales, the recipe of the default run (fp8_static.py)
    fp8                      FP8 with a measured scale for each tensor (fp8.py)
    nvfp4                    numbers of four bits in blocks of 16 (nvfp4.py)

fp16.py has the loss scale that fp16 needs, recipe.py says what a recipe can do and which projection
has which, products.py puts those of a model together, rounding.py rounds in float32 where hardware
lacks a format, and guard.py compares the products of training with those of validation.

Every number of FP8 is exact in bf16. Devices without FP8 multiply the same rounded numbers in bf16
or float32. That is slower, and the results differ by rounding only.
"""
