"""Records: turn logs of train_gpt.py into a record, check one, compare and draw runs. Run
`python -m records --help`."""
