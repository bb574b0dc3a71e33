"""`helper.get_gen_ops()`, under both names that scripts import it by."""

from npu_bridge._lazy import attributes

__all__ = ["get_gen_ops", "helper"]

__getattr__ = attributes(
    __name__, {"get_gen_ops": "npu_bridge.helper.helper:get_gen_ops", "helper": "npu_bridge.helper.helper"}
)
