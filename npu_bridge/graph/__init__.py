"""Reading graphs: what is needed for what, what a run computes, which variables it changes.

The two searches that everything else is made of are in `base/search.py`. `operators.py` reads operators of a
`tf.Graph`, `index.py` is a snapshot of all of them, `control_flow.py` tells loops and conditions, `functions.py` looks
into the functions that nodes call, and `variables.py` answers which variables a run trains. None of them changes a
graph. `loop.py` copies a training step into a `while_loop`, and `copies.py` builds a loss once more.
"""
