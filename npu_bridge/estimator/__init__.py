"""The documented face: `npu_bridge.estimator.npu` and its modules."""
