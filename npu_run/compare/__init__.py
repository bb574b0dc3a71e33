"""Compares two trainings, and finds where they begin to differ: losses, tensors of operators, checkpoints.

Files of any size are read in pieces, without TensorFlow. `losses.py`, `dumps.py` and `checkpoint_files.py` read;
`band.py`, `tensors.py` and `checkpoints.py` each return a `Verdict`; `page.py` shows the results.
"""
