"""Products of numbers of few bits: how the trainer computes with them and learns nevertheless.

    recipe.py   what the trainer asks of a recipe, and which recipe where
    rounding.py to formats of few bits
    fp8.py      FP8 with scales that are measured
    fp16.py     fp16 with a loss scale that adapts itself
    nvfp4.py    numbers of four bits, emulated

FP8 with constant scales, the recipe of the default run, stands in section 7 of train_gpt.py, and so
do bf16, float32 and float64.
"""
