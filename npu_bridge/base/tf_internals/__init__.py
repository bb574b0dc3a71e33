"""Wraps every private name of TensorFlow, Keras and Estimator that this package uses, one small function for each.

No other package uses these names, so only these modules must be checked for a new version of TensorFlow:
`tests/test_internals.py` calls every function and reports those that no longer work. The private modules are imported
when a function is called. All names exist in TensorFlow 2.15.1 with Keras 2.15.0 and Estimator 2.15.0, unless a
function's docstring gives another version.
"""
