"""`npu_bridge.experimental` under its second name."""

from npu_bridge.experimental import (
    decode_image,
    file_constant,
    get_actual_rank_size,
    get_user_rank_id,
    get_user_rank_size,
    getshape,
)

__all__ = [
    "decode_image",
    "file_constant",
    "get_actual_rank_size",
    "get_user_rank_id",
    "get_user_rank_size",
    "getshape",
]
