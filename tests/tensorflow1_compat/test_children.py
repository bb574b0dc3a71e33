"""Programs of Python that a script of TensorFlow 1 starts by name."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from concurrent.futures import thread as executors

import pytest

from tensorflow1_compat import child
from tests.npu_run.launching import npu_run, write_script

SCRIPT = """
import os, subprocess, sys
THREADS = "import threading, time; from concurrent.futures import ThreadPoolExecutor; pool = ThreadPoolExecutor(1); " \\
    "threading.Thread(target=lambda: (time.sleep(1), print(pool.submit(len, [0] * 5).result()))).start()"
import tensorflow as tf
tf.placeholder(tf.float32)
assert os.system("python3 -u steps/data.py 7 > data.txt") == 0
print("file:", open("data.txt").read())
OF_MODULE = ["python3", "-B", "-W", "error::ImportWarning", "-m", "steps.rows", "8"]
print("module:", subprocess.check_output(OF_MODULE, text=True))
print("code:", subprocess.check_output(["python3", "-c", "from steps import names; print(names.found)"], text=True))
OF_1 = "python3 -c 'import tensorflow as tf; print(tf.Session.__name__)' 2> /dev/null"
print("code of TensorFlow 1:", subprocess.getoutput(OF_1))
print("plain:", subprocess.check_output(["python", "-m", "json.tool", "rows.json", "--compact"], text=True))
print("without arguments:", subprocess.run(["python3"], input="print(6 * 7)", stdout=-1, text=True).stdout)
assert subprocess.run(["python3", "steps/data.py", "fails"], stderr=-3).returncode == 1
print("threads:", subprocess.check_output(["python3", "-c", THREADS], text=True))
print("folder:", os.path.dirname(os.environ["PATH"].split(os.pathsep)[0] + "/"))
"""
DATA = """
import sys
import tensorflow as tf
import numpy as np
from names import found
print(tf.contrib.layers.xavier_initializer.__name__, found, np.int(sys.argv[1]), sys.executable, __name__, __file__)
"""
MODULE = """
import sys
import tensorflow as tf
from .names import found
print(tf.Session.__name__, found, sys.argv, __name__, sys.dont_write_bytecode, sys.warnoptions)
"""


@pytest.mark.slow("starts Python in every way there is")
def test_they_are_the_same_python_and_see_tensorflow_1(tmp_path):
    write_script(tmp_path, SCRIPT)
    (tmp_path / "rows.json").write_text("[1, 2]")
    write_script(tmp_path / "steps", DATA, "data.py")
    write_script(tmp_path / "steps", MODULE, "rows.py")
    write_script(tmp_path / "steps", "import tensorflow as tf\nfound = tf.ConfigProto.__name__\n", "names.py")
    code, output = npu_run("train.py", cwd=tmp_path, PATH=os.defpath)
    assert code == 0, output
    path = tmp_path / "steps" / "data.py"
    assert f"file: xavier_initializer ConfigProto 7 {sys.executable} __main__ {path}" in output
    file = tmp_path / "steps" / "rows.py"
    assert f"module: Session ConfigProto ['{file}', '8'] __main__ True ['error::ImportWarning']" in output
    assert "code: ConfigProto" in output and "code of TensorFlow 1: Session" in output
    assert "plain: [1,2]" in output and "without arguments: 42" in output
    assert "threads: 5" in output
    folder = output.rpartition("folder: ")[2].splitlines()[0]
    assert "npu_run_python_" in folder and not os.path.exists(folder)


@pytest.mark.slow("starts Python several times")
@pytest.mark.skipif(not sys.prefix.isascii(), reason="TensorFlow itself cannot be loaded from this folder then")
def test_they_are_so_in_a_folder_whose_name_the_locale_cannot_read(tmp_path):
    folder = tmp_path / "mit Lücke"
    write_script(folder, "import os\nimport tensorflow as tf\ntf.placeholder(tf.float32)\nos.system('python3 data.py')")
    write_script(folder, "import tensorflow as tf\nprint('child:', tf.Session.__name__)", "data.py")
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, output = npu_run("train.py", cwd=folder, **ascii_alone)
    assert code == 0 and "child: Session\n" in output


def test_its_end_waits_for_threads_while_executors_get_new_ones(monkeypatch):
    class Growing(weakref.WeakKeyDictionary):
        def __iter__(self):
            for thread in super().__iter__():
                self[new] = None
                yield thread

    first, new = threading.Thread(), threading.Thread()
    growing, ended = Growing({first: None}), []
    monkeypatch.setattr(executors, "_threads_queues", growing)
    monkeypatch.setattr(threading, "enumerate", lambda: [] if ended else [first, working])
    working = threading.Thread(target=ended.append, args=(1,))
    working.start()
    child._wait_for_threads()
    assert ended
