"""TensorFlow 1.15 for the user's own source files: what they import and call, on the TensorFlow that is installed.

`tables.py` and `removed_names.py` are data: which old name is which thing here. `contrib/` holds what has no
counterpart. `proxies.py` makes module objects of both; `source.py` loads the user's files so that their imports get
those. Nobody else sees any of it.
"""
