"""Sets how gradients are split into fragments that are all-reduced together."""
