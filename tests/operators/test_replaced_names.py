"""Scripts that replace functions of TensorFlow, `tf.nn.dropout = npu_ops.dropout`, change nothing that is ours."""

from __future__ import annotations

import ast
import pathlib

import pytest

from tests.npu_run.launching import ROOT, write_script
from tests.tensorflow1_compat.test_plain_python import run

ROOMS = ("operators", "optimizers", "gradients")
OPERATORS = ("image_ops", "npu_aicore_ops", "npu_cpu_ops", "npu_cube_ops", "npu_ops", "npu_unary_ops", "npu_vector_ops")
FILES = [
    *(path for room in ROOMS for path in sorted((ROOT / "npu_bridge" / room).rglob("*.py"))),
    *(ROOT / "npu_bridge" / "estimator" / f"{name}.py" for name in OPERATORS),
]
# Whatever loads as soon as it is used is not kept, and nor are operators under their own names.
LATER = ("tf.keras", "tf.estimator", "tf.raw_ops", "tf.losses", "tf.metrics", "tf.optimizers", "tf.initializers")
REPLACE = """
    import numpy as np
    import tensorflow as tf
    import npu_bridge.npu_init
    from npu_bridge.estimator import npu_aicore_ops, npu_cpu_ops
    from npu_bridge.npu_init import *

    def replaced(name):
        def raise_(*arguments, **options):
            raise AssertionError(name + " was looked up when it was called")
        return raise_

    for name in NAMES:
        *path, last = name.split(".")[1:]
        at = tf
        for part in path:
            at = getattr(at, part)
        if callable(getattr(at, last, None)) and not isinstance(getattr(at, last), type):  # Keras takes classes there
            setattr(at, last, replaced(name))
"""
OF_OPERATORS = """
    x = npu_bridge.base.own_tensorflow.tf.constant([[0.5, -1.0], [2.0, 0.25]])
    npu_ops.dropout(x, 0.5)
    npu_unary_ops.gelu(x)
    npu_aicore_ops.prelu(x, 0.1)
    npu_aicore_ops.fast_gelu(x)
    npu_aicore_ops.centralization(x, [1])
    npu_aicore_ops.layer_norm(x, [1.0, 1.0], [0.0, 0.0], 1, -1)
    npu_aicore_ops.nonzero(x)
    npu_cpu_ops.randomchoicewithmask(x > 0, 2)
    npu_cpu_ops.dense_image_warp(x[None, :, :, None], x[None, :, :, None] * [1.0, 1.0])
    npu_cpu_ops.stateless_dropout(x, None, 0.5, 1, 2)
    npu_ops.LARSV2(x, x, 0.1, 0.1)
    npu_ops.scatter_elements(x, [[0, 1]], [[1.0, 2.0]])
    print("done")
"""


def names_in(path: pathlib.Path) -> set[str]:
    """Returns dotted names below `tf` in the text of a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith("tf.") and name.replace(".", "").isidentifier() and not name.startswith(LATER):
                found.add(name)
    return found


def test_what_computes_takes_tensorflow_as_it_was():
    for path in FILES:
        imports = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        names = {name.name for node in imports if isinstance(node, ast.Import) for name in node.names}
        assert not {name for name in names if name.partition(".")[0] == "tensorflow"}, path


def test_nothing_of_ours_calls_what_a_script_has_put_in_its_place(tmp_path):
    names = sorted(set().union(*map(names_in, FILES)))
    assert len(names) > 100 and {"tf.nn.dropout", "tf.nn.gelu", "tf.gradients"} <= {*names, "tf.gradients"}
    write_script(tmp_path, f"NAMES = {names}\n" + (REPLACE + OF_OPERATORS).replace("\n    ", "\n"))
    code, output, errors = run(tmp_path)
    assert (code, output) == (0, "done\n"), errors


@pytest.mark.slow("a start of its own for two names")
def test_a_function_may_stand_in_for_the_one_that_it_uses(tmp_path):
    write_script(
        tmp_path,
        """
        import tensorflow as tf
        from npu_bridge.npu_init import *
        tf.nn.dropout, tf.nn.gelu = npu_ops.dropout, lambda x, approximate=True: npu_unary_ops.gelu(x)
        print(tf.nn.dropout(tf.ones([4]), 0.5).shape, tf.nn.gelu(tf.ones([2])).shape)
        """,
    )
    code, output, errors = run(tmp_path)
    assert (code, output) == (0, "(4,) (2,)\n"), errors
