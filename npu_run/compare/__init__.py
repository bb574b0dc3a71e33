"""Compares losses, tensors of operators and checkpoints of two trainings, and finds where they begin to differ.

Files of tensors are read in pieces, whatever their size; TensorFlow reads event files and checkpoints. `losses.py`,
`dumps.py` and `checkpoint_files.py` read the files. `band.py`, `tensors.py` and `checkpoints.py` each return a
`Verdict`. `page.py` shows the results.
"""
