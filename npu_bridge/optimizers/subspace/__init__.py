"""Makes quasi-Newton steps in the space of a few directions that earlier checkpoints span."""
