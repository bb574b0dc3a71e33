"""All private names of TensorFlow, Keras and Estimator that this package uses, one small function for each.

No other module touches them, so a new version of TensorFlow is checked here alone: `tests/test_internals.py` calls
every function and says which one no longer works. The private modules are imported when a function is called. All of it
was seen in TensorFlow 2.15.1 with Keras 2.15.0 and Estimator 2.15.0; where a name is older or newer, its function
says so.
"""
