"""Operators find their partners through renaming and fusing."""

from __future__ import annotations

from npu_run.compare.names import match_operators

LAYER = ["x", "conv/Conv2D", "conv/BiasAdd", "conv/Relu", "dense/MatMul", "loss"]


def test_the_same_names_need_no_rule():
    found = match_operators(LAYER, LAYER)
    assert found.pairs == dict(zip(LAYER, LAYER)) and not found.how and not found.only_a and not found.only_b


def test_names_of_files_are_the_same_names():
    found = match_operators(LAYER, [name.replace("/", "_") for name in LAYER])
    assert found.pairs["conv/Relu"] == "conv_Relu" and found.how["conv/Relu"] == "renamed"


def test_a_fused_operator_is_its_last_part_and_the_others_are_inside():
    for fused in ("conv/Conv2Dconv/BiasAddconv/Relu", "conv_Conv2D_conv_BiasAdd_conv_Relu"):
        found = match_operators(LAYER, ["x", fused, "dense/MatMul", "loss"])
        assert found.pairs["conv/Relu"] == fused and found.how["conv/Relu"] == "fused"
        assert found.inside == {"conv/Conv2D": fused, "conv/BiasAdd": fused}
        assert not found.only_a and not found.only_b


def test_fusing_on_the_side_of_a():
    found = match_operators(["conv/Conv2Dconv/BiasAdd", "loss"], ["conv/Conv2D", "conv/BiasAdd", "loss"])
    assert found.pairs["conv/Conv2Dconv/BiasAdd"] == "conv/BiasAdd" and not found.only_b


def test_one_scope_more_is_found_where_it_is_unique():
    found = match_operators(
        ["dense/MatMul", "dense_1/MatMul", "add"], ["tower/dense/MatMul", "tower/dense_1/MatMul", "a/add", "b/add"]
    )
    assert found.pairs["dense_1/MatMul"] == "tower/dense_1/MatMul" and found.how["dense_1/MatMul"] == "scope"
    assert found.only_a == ["add"] and found.only_b == ["a/add", "b/add"], "two could be it"
    assert not match_operators(["c/add", "add"], ["b/c/add"]).pairs, "it could be of both"


def test_names_that_are_alike_as_files_are_not_guessed():
    found = match_operators(["a/b", "a_b"], ["a.b"])
    assert not found.pairs and found.only_a == ["a/b", "a_b"] and found.only_b == ["a.b"]


def test_pairs_that_are_given_go_first():
    found = match_operators(["one", "two"], ["two", "other"], {"two": "other", "nobody": "two"})
    assert found.pairs == {"two": "other"} and found.only_a == ["one"] and found.only_b == ["two"]


def test_ten_thousand_names_take_no_time():
    names = [f"layer_{number}/{kind}" for number in range(2500) for kind in ("MatMul", "BiasAdd", "Gelu", "add")]
    fused = [f"layer_{number}_MatMul_layer_{number}_BiasAdd" for number in range(2500)]
    found = match_operators(names, [*fused, *(name for name in names if "Gelu" in name)])
    assert len(found.pairs) == 5000 and len(found.inside) == 2500 and len(found.only_a) == 2500
