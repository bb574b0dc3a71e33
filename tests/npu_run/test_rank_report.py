"""The report of a rank about its end, made of errors as TensorFlow and Horovod word them."""

from __future__ import annotations

import json

import pytest

from npu_run.rank.report import describe_exception
from npu_run.rank.trace import format_traceback

IN_GRAPH = """Graph execution error:

Detected at node 'grad_w' defined at (most recent call last):
    File "train.py", line 12, in <module>
Node: 'grad_w'
Mismatched data types: One rank had type float32, but another rank had type float64.
\t [[{{node grad_w}}]]

Original stack trace for 'grad_w':
  File "train.py", line 12, in <module>
"""
EAGER = (
    "{{function_node __wrapped__HorovodAllreduce_device_/job:localhost}} Horovod has been shut down. "
    "[Op:HorovodAllreduce] name: HorovodAllreduce_x"
)
IN_FUNCTION = """in user code:

    File "train.py", line 11, in step  *
        return inner(x)
    File "train.py", line 7, in inner  *

    ValueError: bad
    and more
"""
IN_LAYER = """in user code:

    File "keras/training.py", line 1150, in train_step
        y_pred = self(x, training=True)

    ValueError: Exception encountered when calling layer 'top' (type Top).
    
    in user code:
    
        File "train.py", line 14, in call  *
            raise KeyError("deep reason")
    
        KeyError: 'deep reason'
    
    Call arguments received by layer 'top' (type Top):
      * x=tf.Tensor(shape=(None, 2), dtype=float32)
"""  # noqa: W293 - as Keras writes it


class UnknownError(Exception):
    pass


class UnknownErrorOfTensorFlow(UnknownError):
    __module__ = "tensorflow.python.framework.errors_impl"


class HorovodInternalError(RuntimeError):
    pass


def report(error):
    try:
        raise error
    except BaseException as raised:
        return describe_exception(raised, __file__, 1)


@pytest.mark.parametrize(
    ("error", "summary", "tensor", "secondary"),
    [
        (ValueError("bad batch"), "ValueError: bad batch", "", False),
        (ValueError("ValueError: twice"), "ValueError: ValueError: twice", "", False),
        (ValueError("two\nlines"), "ValueError: two ...", "", False),
        (KeyError("key"), "KeyError: 'key'", "", False),
        (SystemExit(7), "sys.exit(7)", "", False),
        (
            UnknownError(IN_GRAPH),
            "UnknownError: Mismatched data types: One rank had type float32, but another rank had type float64. "
            "(in grad_w)",
            "grad_w",
            False,
        ),
        (
            UnknownError(EAGER),
            "UnknownError: Horovod has been shut down. (in HorovodAllreduce_x)",
            "HorovodAllreduce_x",
            True,
        ),
        (UnknownError(IN_FUNCTION), "ValueError: bad", "", False),
        (ValueError(IN_LAYER), "KeyError: 'deep reason'", "", False),
        (ValueError("in user code:"), "ValueError: in user code:", "", False),
        (UnknownError("[/gloo/transport/tcp/pair.cc] Connection closed by peer"), None, "", True),
        (HorovodInternalError("a peer is gone"), None, "", True),
        (UnknownErrorOfTensorFlow("Socket closed"), None, "", True),
        (ConnectionResetError(104, "Connection reset by peer"), None, "", False),
        (TimeoutError("Timed out waiting for the lock of cache.db"), None, "", False),
    ],
)
def test_reason_in_one_line(error, summary, tensor, secondary):
    got = report(error)
    assert summary is None or got["summary"] == summary
    assert (got["tensor"], got["secondary"], got["code"]) == (tensor, secondary, 1)
    assert "\n" not in got["summary"]


def test_a_secondary_failure_is_found_among_the_causes():
    error = RuntimeError("training stopped")
    error.__cause__ = HorovodInternalError("a peer is gone")
    assert report(error)["secondary"]


def test_a_report_stays_small_whatever_the_exception_says():
    facts = report(ValueError("\N{GRINNING FACE}" * 1_000_000))
    assert facts["summary"].startswith("ValueError: \N{GRINNING FACE}")
    assert len(json.dumps(facts)) < 212_992  # what a socket takes without waiting for who reads it


SCRIPT = """import json
def read(text):
    try:
        return json.loads(text)
    except ValueError as error:
        raise RuntimeError("no configuration") from error
def use(text):
    return json.loads(text)
class Settings(dict):
    def __missing__(self, key):
        return {}[key]
def fill(settings):
    return "%(rate)s" % settings
"""


def trace_of_script(last_line, error=None):
    try:
        exec(compile(f"{SCRIPT}{last_line}\n", "train.py", "exec"), {"error": error})
    except Exception as raised:
        return format_traceback(raised, "train.py").splitlines()
    raise AssertionError("the script ended well")


def test_a_trace_has_the_frames_of_the_script_and_the_reason_and_on_request_all(monkeypatch):
    lines = trace_of_script("use('x')")
    assert [line.strip() for line in lines if "File" in line] == [
        'File "train.py", line 14, in <module>',
        'File "train.py", line 8, in use',
    ]
    assert lines[0] == "Traceback (most recent call last):" and lines[-1].startswith("json.decoder.JSONDecodeError: ")
    assert [line for line in lines if "frames of libraries (npu-run --verbose shows them)" in line]
    monkeypatch.setenv("NPU_BRIDGE_VERBOSE", "1")
    assert len([line for line in trace_of_script("use('x')") if "json" in line and "File" in line]) >= 2


def test_one_failure_is_one_trace_and_its_cause_a_line():
    lines = trace_of_script("read('x')")
    assert sum("Traceback" in line for line in lines) == 1 and lines[-2] == "RuntimeError: no configuration"
    assert lines[-1].startswith("  because of json.decoder.JSONDecodeError: ") and lines[-1].endswith(
        "train.py, line 4"
    )
    assert trace_of_script("Settings()['rate']")[-1] == "KeyError: 'rate'"
    assert "frames" not in "".join(trace_of_script("fill({})"))


REASON_IN_GRAPH = [
    "UnknownError: Mismatched data types: One rank had type float32, but another rank had type float64.",
    "\t [[{{node grad_w}}]]",
    "  grad_w was made here:",
    '  File "train.py", line 12, in <module>',
]
INDENTED_OTHERWISE = IN_GRAPH.replace("    File", "  File").replace("<module>", "<module>\n\n", 1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnknownError(IN_GRAPH), REASON_IN_GRAPH),
        (UnknownError(INDENTED_OTHERWISE), REASON_IN_GRAPH),
        (UnknownError(IN_GRAPH.replace("12", "14")), ["\t [[{{node grad_w}}]]"]),  # that line is in the stack
        (
            UnknownError(IN_FUNCTION),
            ['    File "train.py", line 7, in inner  *', "    ValueError: bad", "    and more"],
        ),
        (ValueError(IN_LAYER), ["        KeyError: 'deep reason'"]),
    ],
)
def test_the_reason_comes_without_what_tensorflow_repeats(error, reason):
    lines = [line.replace(f"{__name__}.", "") for line in trace_of_script("raise error", error)]
    text = "\n".join(lines)
    assert "\n".join(reason) in text
    assert "Original stack trace" not in text and "Graph execution" not in text and "" not in lines


SEVERAL_EPOCHS = """
import contextlib, sys
import tensorflow as tf
from npu_run.rank.input_end import watch_input
told = []
watch_input(told.append)
if sys.argv[1] == "session":
    tf1 = tf.compat.v1
    with tf.Graph().as_default(), tf1.Session() as session:
        rows = tf1.data.make_initializable_iterator(tf.data.Dataset.range(2))
        weight = tf1.get_variable("weight", [])
        train = tf1.train.GradientDescentOptimizer(0.1).minimize(weight * tf.cast(rows.get_next(), tf.float32))
        session.run(weight.initializer)
        for epoch in range(2):
            session.run(rows.initializer)
            with contextlib.suppress(tf.errors.OutOfRangeError):
                while True:
                    session.run(train)
else:
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for epoch in range(2):
        model.fit(tf.ones([2, 1]), tf.ones([2, 1]), batch_size=1, verbose=0)
print("told", [each["input_end"] and each["input_end"]["steps"] for each in told])
"""


@pytest.mark.parametrize("way", ["session", "fit"])
def test_an_end_of_input_is_taken_back_when_the_training_goes_on(warm_python, tmp_path, way):
    (tmp_path / "train.py").write_text(SEVERAL_EPOCHS)
    ended = warm_python.run([tmp_path / "train.py", way], tmp_path)
    assert "told [2, None, 4]\n" in ended.stdout, ended.stderr
