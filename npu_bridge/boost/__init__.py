"""Turns on features for faster training, by a level or a dictionary: `boost.apply(model, level="O1")`.

The names are imported at their first use.
"""

from npu_bridge.base.lazy import lazy_getattr

_PLACES = {
    "FEATURES": "npu_bridge.boost.config:FEATURES",
    "LEVELS": "npu_bridge.boost.config:LEVELS",
    "Basis": "npu_bridge.optimizers.subspace.basis:Basis",
    "BoostConfig": "npu_bridge.boost.config:BoostConfig",
    "CosineHead": "npu_bridge.operators.cosine_head:CosineHead",
    "SubspaceNewton": "npu_bridge.optimizers.subspace.newton:SubspaceNewton",
    "apply": "npu_bridge.boost.choice:apply",
    "compute_pca_basis": "npu_bridge.optimizers.subspace.basis:compute_pca_basis",
    "less_batch_norm": "npu_bridge.boost.thinning:less_batch_norm",
    "train_in_subspace": "npu_bridge.boost.subspace_model:train_in_subspace",
}

__all__ = list(_PLACES)
__getattr__ = lazy_getattr(__name__, _PLACES)
