"""The two files precision options name: `modify_mixlist` and `customize_dtypes`."""

from __future__ import annotations

import pytest

from npu_bridge.session.precision.mixlist import read_mixlist
from npu_bridge.session.precision.operator_dtypes import read_operator_dtypes
from tests.refusing import refuses


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "file"
        path.write_text(text)
        return str(path)

    return write


def test_mixlist_with_comments(file):
    mixlist = read_mixlist(
        file(
            """{
  // a comment with "quotes"
  "black-list": { // another
     "to-add": ["Relu", "Tanh"],
     "to-remove": ["Softmax"]
  },
  "white-list": {"to-add": ["Add"], "to-remove": ["Conv2D"]}
}"""
        )
    )
    assert mixlist == ({"Add"}, {"Relu", "Tanh"}, {"Softmax", "Conv2D"})


def test_a_denied_type_that_is_removed_too_and_an_empty_mixlist(file):
    text = '{"black-list": {"to-add": ["MatMul"]}, "white-list": {"to-remove": ["MatMul"]}}'
    assert read_mixlist(file(text)) == (set(), {"MatMul"}, set())
    assert read_mixlist(file("{}")) == (set(), set(), set())


@refuses(
    ValueError,
    ("", "not JSON"),
    ("[]", "not an object"),
    ('{"black_list": {}}', "Did you mean 'black-list'"),
    ('{"black-list": {"add": []}}', "'add'"),
    ('{"black-list": {"to-add": "Relu"}}', "'Relu'"),
    ('{"black-list": {"to-add": ["Relu,Tanh"]}}', "Relu,Tanh"),
    ('{"black-list": []}', "list"),
    ('{"black-list": {"to-add": ["A"]}, "white-list": {"to-add": ["A"]}}', "both lists"),
    ('{"white-list": {"to-add": ["A"], "to-remove": ["A"]}}', "white-list"),
)
def test_a_mixlist_that_is_none(text, file):
    read_mixlist(file(text))


def test_operator_dtypes(file):
    read = read_operator_dtypes(
        file(
            """
# by name
dense/MatMul::InputDtype:float16,float16,OutputDtype:float16   # the first layer
OpType::Softmax:InputDtype:float32,OutputDtype:float32
OpType::GatherV2:InputDtype:float16,int32,OutputDtype:float16
OpType::BatchMatMulV2:InputDtype:bfloat16,bfloat16,OutputDtype:bfloat16
OpType::Conv2DBackpropInputD:InputDtype:float32,float32,OutputDtype:float32
"""
        )
    )
    assert not read.has_rounding
    assert read.by_name == {"dense/MatMul": "float16"}
    assert read.by_type == {
        "Softmax": "float32",
        "GatherV2": "float16",
        "BatchMatMulV2": "bfloat16",
        "Conv2DBackpropInput": "float32",
    }


def test_inputs_and_outputs_of_different_dtypes(file):
    """Types are those of an NPU's compiler; a leading input that is not a floating number may stand before the list."""
    read = read_operator_dtypes(
        file(
            """OpType::MatMulV2:InputDtype:float16,float16,float32,OutputDtype:float32
OpType::MatMul:InputDtype:float32,float32,OutputDtype:float16
OpType::MatMulV2:InputDtype:float32,float32,OutputDtype:float32
OpType::Conv2DBackpropInput:int32,InputDtype:float16,float16,OutputDtype:float32
OpType::DepthwiseConv2D:InputDtype:fp16,fp32,OutputDtype:fp32
head/MatMul::InputDtype:bfloat16,float32,OutputDtype:float32
body/MatMul::InputDtype:float16,float32,OutputDtype:float32
body/MatMul::InputDtype:float16,float16,OutputDtype:float16
"""
        )
    )
    assert read.rounding_by_type == {
        "MatMul": ((None, None), ("float16",)),
        "Conv2DBackpropInput": ((None, "float16", "float16"), (None,)),
        "DepthwiseConv2dNative": (("float16", None), (None,)),
    }
    assert read.rounding_by_name == {"head/MatMul": (("bfloat16", None), (None,))}
    assert read.by_name == {"head/MatMul": "float32", "body/MatMul": "float16"}
    assert set(read.by_type.values()) == {"float32"}


@refuses(
    ValueError,
    ("MatMul float16", "not a rule"),
    ("a::InputDtype:float16,half,OutputDtype:float16", "half"),
    ("a::InputDtype:,OutputDtype:", "names no dtype"),
    says=["line 2"],
)
def test_operator_dtypes_that_are_none(line, file):
    read_operator_dtypes(file(f"# first\n{line}\n"))
