"""Products of numbers of few bits: how the trainer computes with them and learns nevertheless.

    recipe.py   what the trainer asks of a recipe, which recipe where, and rounding
    fp8.py      FP8 with scales that are measured
    fp16.py     fp16 with a loss scale that adapts itself
    nvfp4.py    numbers of four bits, emulated
    finite.py   a number that is not finite is traced to its origin

FP8 with constant scales, the recipe of the default run, stands in section 7 of train_gpt.py, and so
do bf16, float32 and float64.
"""
