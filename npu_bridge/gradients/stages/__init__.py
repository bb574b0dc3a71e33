"""The gradient transformations between backward pass and update: a new one is a class of `Stage` in a file here."""
