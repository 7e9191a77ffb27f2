"""What serves train_gpt.py and decides nothing on its default path: one file for each subject.

ranks.py says which process this is, kernels.py has the GPU kernels, compiling.py compiles functions
and reports it. recipe.py says what the trainer asks of a recipe for low precision; fp8.py, nvfp4.py
and fp16.py are one recipe each. No file here imports train_gpt.py.
"""
