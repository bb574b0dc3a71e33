"""Reading graphs: what is needed for what, what a run computes, which variables it changes.

`search.py` holds the two searches that everything else is made of: breadth first, and in the order of dependencies. It
works without TensorFlow. `operators.py` reads operators of a `tf.Graph`, `index.py` is a snapshot of all of them,
`control_flow.py` tells loops and conditions, `functions.py` looks into the functions that nodes call, and
`variables.py` answers which variables a run trains. Nothing here changes a graph.
"""
