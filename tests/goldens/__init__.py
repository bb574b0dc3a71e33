"""Small trainings that are registered once, and run in every way to train, on any number of ranks.

To add a case, write one line `_add(...)` in `cases.py`: a name, the tables of its stages, and in which ways it is
trained on how many ranks, in `make test` (`fast`) or only in `make test-all` (`slow`). `gradients/test_goldens.py`,
`ranks/test_goldens.py` and `gpu/` then run it, and `checks.py` compares values, scales and what ranks keep with the
model in numpy after each step. A new stage gets its formula in `models.py` and its arguments in `chains.py`, which
combines it with every other stage. A new way to train is a class in `ways.py`, a new network one in `problems.py`.

`two_layers.py` and `keras_models.py` hold the models of tests that compare with stock TensorFlow instead of numpy, and
`sets.py` trainings that resume from each other's checkpoints.
"""
