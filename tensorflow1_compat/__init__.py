"""Lets the user's source files import and call TensorFlow 1.15, on the installed TensorFlow 2.

`tables.py` and `removed_names.py` map old names to current names. `contrib/` implements names that have no current
counterpart. `proxies.py` makes modules with these names, and `source.py` makes imports in the user's files return such
modules. All other code imports the installed TensorFlow.
"""
