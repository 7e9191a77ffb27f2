"""Records: turn logs of train_gpt.py into a record, check one, compare two. Run `python -m records --help`."""
