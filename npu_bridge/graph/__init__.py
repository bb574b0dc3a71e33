"""Reads graphs: which ops depend on which, what a run computes, which variables it changes.

The two searches that everything else uses are in `base/search.py`. `operators.py` reads operators of a `tf.Graph`,
`index.py` is a snapshot of all of them, `control_flow.py` finds loops and conditions, `functions.py` looks into the
functions that nodes call, and `variables.py` finds the variables that a run trains. None of these modules changes a
graph. `loop.py` copies a training step into a `while_loop`, and `copies.py` copies the ops of a loss.
"""
