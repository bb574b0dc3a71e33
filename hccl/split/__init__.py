"""How gradients are split into fragments that travel together."""
