"""What serves train_gpt.py: one file for each subject, and none of them imports it.

ranks.py says which process this is, stopping.py notices signals, arguments.py reads the command
line. checkpoint.py writes weights, saving.py all that a run is made of, so that it can go on.
kernels.py has the GPU kernels, masks.py what attention sees, and rows.py the looked-up rows of
tables. compiling.py compiles functions and reports it. recipe.py says what the trainer asks of a
recipe for low precision; fp8.py, nvfp4.py and fp16.py are one recipe each.
"""
