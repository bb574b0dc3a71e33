"""Lets the user's own source files import and call TensorFlow 1.15, on the installed TensorFlow.

`tables.py` and `removed_names.py` map old names to their places today. `contrib/` holds everything without a
counterpart. `proxies.py` makes module objects of both; `source.py` loads the user's files so that their imports get
these objects. No other code sees them.
"""
