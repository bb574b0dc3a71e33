"""Whether two trainings agree, and where they begin to differ: losses, tensors of operators, checkpoints.

Files are read here without TensorFlow, in pieces, so that their size does not matter. `losses.py`, `dumps.py` and
`checkpoint_files.py` read; `band.py`, `tensors.py` and `checkpoints.py` judge, each with a `Verdict`; `page.py` shows.
"""
