"""Run configuration, estimator, optimizers, loss-scale managers and hooks, each in the module its page names."""
