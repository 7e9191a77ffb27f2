"""What a run says and leaves behind, in its log and on the screen (journal.py, report.py).
And records: turn logs of train_gpt.py into a record, check one, and compare runs. Run `python
-m records --help`."""
