"""Copies TensorFlow's lists of operator types, to imitate mixed precision; `rewriter.py` changes the real lists.

- *allow*: always lowered. Other types are lowered only near operators of this list.
- *infer*: lowered between lowered operators; in bfloat16 also right after a lowered operator.
- *clear*: types that choose, move or compare values; lowered if their neighbours are lowered.
- *deny*: never lowered; an operator of the infer list that follows is not lowered either.

Source: the lists that TensorFlow 2.15 writes to `TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LOG_PATH`. Of the types that
only GPUs have, only those of the allow list are here. Later versions have moved a few types. These lists are used with
later versions too, so that an imitated training gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from npu_bridge.session.precision.modes import BFLOAT16, FLOAT16

PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"


class TypeLists(NamedTuple):
    """The operator types in each list; a type is in at most one list."""

    allow: frozenset[str]
    infer: frozenset[str]
    clear: frozenset[str]
    deny: frozenset[str]


def _split_type_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BOTH = TypeLists(
    allow=_split_type_names("""
        BatchMatMul BatchMatMulV2 Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2
        Conv3DBackpropInputV2 DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter
        DepthwiseConv2dNativeBackpropInput Einsum MatMul
    """),
    infer=_split_type_names("""
        Add AddN AddV2 AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BiasAdd BiasAddGrad BiasAddV1 Elu EluGrad Erf
        FloorDiv FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 LeakyRelu LeakyReluGrad
        Log Log1p LogSoftmax Mul Prod RealDiv Reciprocal Selu SeluGrad Sigmoid SigmoidGrad Softmax Softplus
        SoftplusGrad Softsign SoftsignGrad Sqrt Sub TanhGrad
    """),
    clear=_split_type_names("""
        Abs ArgMax ArgMin BatchToSpace BatchToSpaceND BroadcastTo Ceil CheckNumerics ClipByValue Concat ConcatV2
        DepthToSpace DynamicPartition DynamicStitch EnsureShape Enter Equal Exit ExpandDims Fill Floor Gather GatherNd
        GatherV2 Greater GreaterEqual Identity IsFinite IsInf IsNan Less LessEqual Max MaxPool MaxPool3D MaxPool3DGrad
        MaxPoolGrad MaxPoolGradGrad MaxPoolGradGradV2 MaxPoolGradV2 MaxPoolV2 Maximum Merge Min Minimum MirrorPad
        MirrorPadGrad Neg NextIteration NotEqual OnesLike Pack Pad PadV2 PreventGradient Relu Relu6 Relu6Grad
        ReluGrad Reshape ResizeNearestNeighbor ResizeNearestNeighborGrad Reverse ReverseSequence ReverseV2 Round
        Select SelectV2 Sign Slice Snapshot SpaceToBatch SpaceToBatchND SpaceToDepth Split SplitV Squeeze StopGradient
        StridedSlice StridedSliceGrad Switch Tile TopK TopKV2 Transpose Unpack Where ZerosLike
    """),
    deny=_split_type_names("""
        Exp Expm1 L2Loss Mean Pow SaveV2 SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits
    """),
)
_ALSO = {
    FLOAT16: TypeLists(
        allow=_split_type_names("""
            BlockLSTM BlockLSTMGrad BlockLSTMGradV2 BlockLSTMV2 Conv3DBackpropFilter Conv3DBackpropInput CudnnRNN
            CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3 CudnnRNNV2 CudnnRNNV3 GRUBlockCell GRUBlockCellGrad
            LSTMBlockCell LSTMBlockCellGrad
        """),
        infer=_split_type_names("Erfc Inv Tanh"),
        clear=_split_type_names("MaxPool3DGradGrad OneHot"),
        deny=_split_type_names("Sum"),
    ),
    BFLOAT16: TypeLists(
        allow=_split_type_names("FusedPadConv2D"),
        infer=_split_type_names("Rsqrt Square SquaredDifference"),
        clear=_split_type_names("ResizeBilinear ScatterNd"),
        deny=_split_type_names(""),
    ),
}
# Matrix products and convolutions of every kind.
MATRIX_TYPES = _BOTH.allow | _split_type_names("BatchMatMulV3 Conv3DBackpropFilter Conv3DBackpropInput")
# Types of the clear list whose results can need more bits than their inputs: they add up or interpolate.
_ADDING = frozenset(
    {name for name in _BOTH.clear if name.startswith("MaxPool") and "Grad" in name}
) | _split_type_names("MirrorPadGrad ResizeBilinear ResizeNearestNeighborGrad ScatterNd")
# Types that pass on values of their inputs unchanged: after rounded inputs, the outputs need no rounding.
EXACT = (_BOTH.clear | _ALSO[FLOAT16].clear | _ALSO[BFLOAT16].clear) - _ADDING


def type_lists_for(low_dtype: str, variables: Mapping[str, str]) -> TypeLists:
    """Returns the lists for a low dtype, after the changes in the environment variables of TensorFlow's rewriter.

    Args:
      low_dtype: "float16" or "bfloat16".
      variables: dict from a variable, such as `TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_ALLOWLIST_ADD`, to comma-separated
        types.
    """
    changed = []
    for name, common, also in zip(TypeLists._fields, _BOTH, _ALSO[low_dtype]):
        added, removed = (
            frozenset(variables.get(f"{PREFIX}{name.upper()}LIST_{change}", "").split(","))
            for change in ("ADD", "REMOVE")
        )
        changed.append(((common | also) | added) - removed - {""})
    return TypeLists(*changed)
