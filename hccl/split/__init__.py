"""Sets how gradients are split into fragments; the gradients of a fragment are all-reduced together."""
