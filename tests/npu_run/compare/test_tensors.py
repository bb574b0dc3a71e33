"""Two dumps: the first operator out of tolerance, what came before and after it, and names of the NPU toolchain."""

from __future__ import annotations

import csv
import json
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf

from npu_run.compare.dumps import DumpKey, read_csv_pairs, read_dumps, write_named_outputs
from npu_run.compare.tensors import compare_dumps
from npu_run.compare.verdict import NotComparableError
from tests.session.models import session_config

tf1 = tf.compat.v1


def dump(folder, low=False, factor=1.0, fed=1.0, weight=1.0, steps="0", **options):
    """Two layers and a gradient, for two steps; gives the dumps."""
    folder.mkdir()
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [4, 8], "x")
        kernel = tf1.get_variable("kernel", initializer=np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6) * weight)
        product = tf.matmul(x, kernel, name="one/product")
        if low:
            product = tf.cast(tf.cast(product, tf.bfloat16), tf.float32)
        product = tf.identity(product, "two/product")
        loss = tf.reduce_mean(tf.square(tf.nn.relu(product, name="two/relu"), name="two/square"), name="loss")
        (grad,) = tf.gradients(loss, [kernel])
        update = kernel.assign_sub(tf.multiply(grad, 0.1 * factor, name="scaled"), name="update")
        config = session_config(enable_dump=True, dump_path=str(folder), dump_step=steps, **options)
        with tf1.Session() as plain, tf1.Session(config=config) as session:
            del plain
            session.run(kernel.initializer)
            for step in range(2):
                features = np.random.RandomState(step).randn(4, 8).astype(np.float32)
                session.run([update, loss], {x: features * np.float32(fed)})
    return read_dumps(str(folder))


def of_training(dumps):
    return [one for one in dumps if "two/relu" in one.operators]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return of_training(dump(tmp_path_factory.mktemp("dumps") / "base", steps="0-1"))


def test_the_same_training_is_inside(base, tmp_path):
    other = of_training(dump(tmp_path / "b", steps="0-1"))
    (file,) = (each for place, each in other[0].files.items() if place.op == "two/relu")
    path = pathlib.Path(other[0].path, file[0])
    np.save(path, np.load(path) * np.float32(1 + 2**-15))
    verdict, done = compare_dumps(base, other)
    said = "tensors of 2 steps are within tolerance; the largest relative error is 3.1e-05, at 'two/relu'."
    assert verdict.is_inside and verdict.sentence == f"All {2 * len(done.rows)} {said}"
    assert [one.key.step for one in base] == [0, 1] and done.first is None and json.dumps(verdict.facts)


def test_the_first_operator_in_another_dtype_is_named_with_inputs_that_are_inside(base, tmp_path):
    verdict, done = compare_dumps(base, of_training(dump(tmp_path / "b", low=True)))
    assert verdict.is_inside is False and done.first.place.op == "two/product"
    assert "'two/product' (Identity)" in verdict.sentence and "its input 'one/product' is inside" in verdict.sentence
    assert done.inputs == {"one/product": True}
    assert done.readers["two/relu"] is False
    assert any(note.startswith("Operators of B without a partner: ") for note in verdict.notes)


def test_what_repeats_of_a_differ_in_is_not_judged(base, tmp_path):
    one, two = (of_training(dump(tmp_path / name, factor=factor)) for name, factor in (("one", 1.01), ("two", 1.02)))
    verdict, done = compare_dumps(base, one, repeats=[two])
    assert verdict.is_inside and verdict.facts["compared"] == sum(not row.is_noise for row in done.rows)
    assert any(note.startswith("Tensors that were not judged, as A's own repeats differ") for note in verdict.notes)
    assert "the largest relative error is 0," in verdict.sentence, verdict.sentence
    with pytest.raises(NotComparableError, match="own repeats differ in .* so a difference of B shows nothing"):
        compare_dumps(base, one, repeats=[of_training(dump(tmp_path / "fed", fed=2.0))])


def test_errors_are_held_against_those_of_repeats(base, tmp_path):
    repeat = of_training(dump(tmp_path / "repeat", factor=1.00005))
    verdict, done = compare_dumps(base, of_training(dump(tmp_path / "b", factor=1.0002)))
    assert not verdict.is_inside and done.first.place.op == "scaled"
    verdict, done = compare_dumps(base, of_training(dump(tmp_path / "again", factor=1.0002)), repeats=[repeat])
    assert verdict.is_inside and {row.place.op: row.agreement.tolerance for row in done.rows}["scaled"] > 3e-4
    assert {row.agreement.tolerance for row in done.rows if row.place.op == "two/relu"} == {1e-4}
    verdict, done = compare_dumps(base, of_training(dump(tmp_path / "more", factor=1.002)), repeats=[repeat])
    assert not verdict.is_inside and done.first.place.op == "scaled"


def test_a_reference_variable_that_the_step_has_changed_is_not_the_first(tmp_path):
    """Its read may show the value after the update, which is wrong because of what came later."""

    def trained(folder, factor, start=1.0):
        folder.mkdir()
        config = session_config(enable_dump=True, dump_path=str(folder), dump_step="0")
        with tf.Graph().as_default():
            first = np.linspace(1, 2, 6, dtype=np.float32) * np.float32(start)
            weight = tf1.get_variable("weight", initializer=first, use_resource=False)
            scaled = tf.multiply(tf.multiply(weight, 0.25, name="quarter"), factor, name="scaled")
            train = tf1.train.GradientDescentOptimizer(0.5).minimize(tf.reduce_sum(tf.square(scaled), name="loss"))
            with tf1.Session(config=config) as session:
                session.run(weight.initializer)
                session.run(train)
        return [one for one in read_dumps(str(folder)) if "scaled" in one.operators]

    a = trained(tmp_path / "a", 1.0)
    for name, factor, start, first in (("b", 1.1, 1.0, "scaled"), ("start", 1.0, 1.1, "quarter")):
        verdict, done = compare_dumps(a, trained(tmp_path / name, factor, start))
        inside = {row.place.op: row.is_inside_tolerance for row in done.rows}
        assert inside["weight/read"] is False and done.first.place.op == first, verdict.sentence
        said = "'weight/read' is out, too, or shows the variable after this step."
        assert verdict.sentence.endswith(said) == (name == "start")


def test_what_differs_before_anything_is_computed(base, tmp_path):
    whole = of_training(dump(tmp_path / "whole", dump_mode="all"))
    verdict, _ = compare_dumps(whole, of_training(dump(tmp_path / "fed", dump_mode="all", fed=1.01)))
    assert "'input 0 of one/product' (MatMul)" in verdict.sentence and "B is 1.01 times A" in verdict.sentence
    verdict, _ = compare_dumps(base, of_training(dump(tmp_path / "weight", weight=1.01)))
    assert "ReadVariableOp" in verdict.sentence and verdict.sentence.endswith("; B starts from other values.")


def test_a_later_step_is_told(base, tmp_path):
    other = of_training(dump(tmp_path / "b", steps="0-1"))
    place = next(place for place in other[1].files if place.op == "two/relu")
    path = pathlib.Path(other[1].path, other[1].files[place][0])
    np.save(path, np.load(path) * 2 + np.nan)
    verdict, _ = compare_dumps(base, other)
    assert verdict.facts["step"] == 1 and "NaN or infinity in 0 elements of A and 24 of B" in verdict.sentence


def test_names_of_the_toolchain_there_and_back(base, tmp_path):
    count = write_named_outputs(base[0], str(tmp_path / "named"))
    names = sorted(path.name for path in (tmp_path / "named").iterdir())
    assert count == len(names) and any(name.startswith("two_relu.0.") for name in names)
    (named,) = read_dumps(str(tmp_path / "named"))
    verdict, done = compare_dumps(base, [named])
    assert verdict.is_inside and done.rows[-1].how in ("", "renamed") and not done.matching.only_a
    back, _ = compare_dumps([named], base)
    assert back.is_inside, "either side may be the one"


def npu_folder(base, folder, mapping=False, fuse=True):
    """Outputs of a step as a device may have computed them: fused and renamed, with an error in the gradient."""
    folder.mkdir()
    step, rows = base[0], []
    for number, (place, (file, _)) in enumerate(step.files.items()):
        name = place.op.replace("/", "_")
        if fuse and place.op == "two/square":
            continue
        if fuse and place.op == "loss":
            name = "two/squareloss".replace("/", "_")
        values = np.load(pathlib.Path(step.path, file))
        if place.op == "scaled":
            values = values * np.float32(1.01)
        full = f"{name}.{place.slot}.16000000{number:05}.npy"
        np.save(folder / (f"{number}.npy" if mapping else full), values)
        rows.append([f"{number}.npy", full])
    if mapping:
        with open(folder / "mapping.csv", "w", newline="") as file:
            csv.writer(file).writerows(rows)


@pytest.mark.parametrize("mapping", [False, True])
def test_files_of_a_device_with_fused_operators_and_a_mapping(base, tmp_path, mapping):
    npu_folder(base, tmp_path / "npu", mapping)
    verdict, done = compare_dumps(base, read_dumps(str(tmp_path / "npu")))
    assert done.first.place.op == "scaled" and "B is 1.01 times A" in verdict.sentence
    assert done.matching.inside == {"two/square": "two_squareloss"} and done.matching.how["loss"] == "fused"
    assert "Operators of A inside fused ones of B: 1, two/square." in verdict.notes


def test_converted_dumps_of_a_device(base, tmp_path):
    (tmp_path / "0").mkdir()
    for place, (file, _) in base[0].files.items():
        name = f"{base[0].types[place.op]}.{place.op.replace('/', '_')}.12.3.1600000000000.output.{place.slot}.npy"
        shutil.copy(pathlib.Path(base[0].path, file), tmp_path / "0" / name)
    (found,) = read_dumps(str(tmp_path))
    assert found.types["two_relu"] == "Relu" and compare_dumps(base, [found])[0].is_inside


def test_names_that_are_given(base, tmp_path):
    npu_folder(base, tmp_path / "npu", fuse=False)
    for path in (tmp_path / "npu").glob("two_relu.*"):
        path.rename(path.with_name(path.name.replace("two_relu", "activation_7")))
    assert "two/relu" in compare_dumps(base, read_dumps(str(tmp_path / "npu")))[1].matching.only_a
    (tmp_path / "names.csv").write_text("two/relu,activation_7\n")
    done = compare_dumps(
        base, read_dumps(str(tmp_path / "npu")), given_pairs=read_csv_pairs(str(tmp_path / "names.csv"))
    )[1]
    assert done.matching.pairs["two/relu"] == "activation_7" and not done.matching.only_a


def test_other_shapes_and_ranks_and_damaged_files_are_told(base, tmp_path):
    write_named_outputs(base[0], str(tmp_path / "named"))
    folder = tmp_path / "named"
    paths = {path.name.split(".")[0]: path for path in folder.iterdir()}
    for name, content in (("two_relu", np.ones((4, 7), np.float32)), ("two_square", None)):
        paths[name].unlink()
        paths[name].write_bytes(b"") if content is None else np.save(paths[name], content)
    verdict, _ = compare_dumps(base, read_dumps(str(folder)))
    assert verdict.is_inside
    (note,) = (note for note in verdict.notes if note.startswith("Tensors that could not be compared: 2, "))
    assert "'two/relu' has the shape [4, 6] in A and [4, 7] in B" in note and "is not an array of numpy" in note
    others = [one._replace(key=DumpKey(9, 3, "")) for one in base]
    assert compare_dumps(base[:1], others[:1])[0].notes[0] == "Step 0 of A is compared with step 9 of B."
    with pytest.raises(NotComparableError, match=r"no step in common: A has \[0, 1\], B has \[9, 10\]"):
        compare_dumps(base, [others[0], others[1]._replace(key=DumpKey(10, 3, ""))])


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("index.json", "{", "cannot be read: "),
        ("index.json", '{"tensors": [{}]}', "is not an index of a dump: KeyError"),
        ("index.json", "[]", "is not an index of a dump: "),
        ("statistics.csv", "op,type\n", 'dump the tensors themselves: dump_data="tensor"'),
        ("mapping.csv", "alone\n", "has no line with two names"),
        ("readme.txt", "", "holds no dumped tensors; expected index.json"),
    ],
)
def test_folders_that_hold_no_dump_are_one_sentence(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(NotComparableError, match=said):
        read_dumps(str(tmp_path))
