"""What serves train_gpt.py: a file for each subject. None of them imports the script.

Before a run
    command_line.py the keys of a configuration, and what their values may be
    planning.py     the configuration of a run, what it reads, and where it writes

Its processes
    process.py      variables that torch reads when it starts, and signals
    ranks.py        which of the processes this is, how they agree, and how they share the weights
    faults.py       how an error ends a run
    checkpoints.py  files of weights, and saves of a whole run, so that it can go on

Computing
    warmup.py       everything is compiled and run once before the clock starts
    gpu.py          compiled functions, CUDA graphs, and work that runs beside other work
    kernels.py      the GPU kernels of layers and loss, beside plain PyTorch that computes the same
    precision/      recipes of low precision: FP8, NVFP4, and fp16's loss scale. By default only
                    FP8 with constant scales is used
    batches.py      a step's batch, shared out over ranks, groups and micro-batches
    past.py         what the tokens alone say: hashes of n-grams, guesses of the next token. It
                    makes the next batch ready, with its candidates and the rows it looks up
    candidates.py   the tokens of the vocabulary that a training loss is computed over
    masks.py        which tokens attention sees
    tables.py       the rows of large tables that a step looks up, and their update
"""
