"""`tf.contrib.graph_editor`: inspects graphs, changes connections, and copies parts of graphs."""

from tensorflow1_compat.contrib.graph_editor import reroute, select, subgraph, transform, util
from tensorflow1_compat.contrib.graph_editor.reroute import (
    add_control_inputs,
    remove_control_inputs,
    reroute_ts,
    swap_ts,
)
from tensorflow1_compat.contrib.graph_editor.select import *
from tensorflow1_compat.contrib.graph_editor.subgraph import (
    SubGraphView,
    make_view,
    make_view_from_scope,
    sgv,
    sgv_scope,
)
from tensorflow1_compat.contrib.graph_editor.transform import (
    TransformerInfo,
    copy,
    copy_with_input_replacements,
    graph_replace,
)
from tensorflow1_compat.contrib.graph_editor.util import (
    ControlOutputs,
    get_consuming_ops,
    get_generating_ops,
    get_tensors,
    make_list_of_op,
    make_list_of_t,
    make_placeholder_from_dtype_and_shape,
    make_placeholder_from_tensor,
    placeholder_name,
)
