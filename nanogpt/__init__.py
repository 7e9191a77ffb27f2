"""What serves train_gpt.py: a file for each subject. None of them imports the script.

Before a run
    command_line.py the keys of a configuration, and what their values may be
    planning.py     the configuration of a run, what it reads, and where it writes

Its processes
    process.py      variables that torch reads when it starts, and signals
    ranks.py        which of the processes this is, and how they agree
    faults.py       how an error ends a run

What is kept and said
    checkpoints.py  files of weights, and saves of a whole run, so that it can go on
    report.py       what a run says when it begins and when it has ended

Computing
    kernels.py      the GPU kernels of layers and loss, beside plain PyTorch that computes the same
    warmup.py       everything is compiled and run once before the clock starts
    compiling.py    compiled functions that report what they compiled, and CUDA graphs
    batches.py      a step's batch, shared out over ranks, groups and micro-batches
    masks.py        which tokens attention sees
    past.py         what the tokens alone say: hashes of n-grams, guesses of the next token
    candidates.py   the tokens of the vocabulary that a training loss is computed over
    slices.py       the large dense weights, shared out over the ranks
    tables.py       the rows of large tables that a step looks up, and their update
    streams.py      CUDA streams for work that runs beside the main one
    precision/      recipes of low precision: FP8, NVFP4, and fp16's loss scale
"""
