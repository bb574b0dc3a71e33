"""Jobs over two hosts with a link of 1 Gbit/s between them: they train, and they end well when something fails."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest
import tensorflow as tf

from tests.launch.launching import needs_horovod, wait_for

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(180), needs_horovod]

TRAIN = pathlib.Path(__file__).with_name("train.py")
PARAMETERS = 3125 + 250_000
FOR_EVER = 1_000_000


def start(hosts, folder, steps, mischief="", options=()):
    """Starts the training; gives the launcher's process."""
    return hosts.start_ranks(TRAIN, folder, steps, *filter(None, [mischief]), options=options)


def finish(hosts, process, limit_secs=60):
    """Waits for the end; gives exit code and last line, after checking that nothing stays behind on either host."""
    try:
        text, _ = process.communicate(timeout=limit_secs)
    except subprocess.TimeoutExpired:
        hosts.end_all_processes()
        pytest.fail(f"npu-run did not end within {limit_secs} s. Its output:\n{process.communicate()[0]}")
    print(text)
    wait_for(lambda: not hosts.process_ids(0) + hosts.process_ids(1), "both hosts to be empty", limit_secs=10)
    return process.returncode, (text.splitlines() or [""])[-1]


def assert_checkpoint_is_whole(folder):
    reader = tf.train.load_checkpoint(str(folder))
    assert reader.get_tensor("global_step") > 0
    assert reader.get_tensor("weight").shape == (3125,) and reader.get_tensor("ballast").shape == (250_000,)


def test_ranks_on_two_hosts_train_one_model(hosts, tmp_path):
    steps = 24
    job = hosts.run_ranks(TRAIN, tmp_path, steps, limit_secs=120)
    assert job.exit_code == 0, job.text
    assert "[rank 1] loss" in job.text
    first, last = zip(*([float(text) for text in re.findall(r"^loss (\S+)$", log, re.M)] for log in job.outputs))
    assert all(after < before / 2 for before, after in zip(first, last))
    (name_0, weights_0), (name_1, weights_1) = (
        re.search(r"^host (\S+) weights (\S+)$", log, re.M).groups() for log in job.outputs
    )
    assert (name_0, name_1) == ("hosta", "hostb")
    assert weights_0 == weights_1
    assert tf.train.load_checkpoint(str(tmp_path)).get_tensor("global_step") == steps
    # On two ranks a ring sends every byte once in each direction.
    for sent in job.sent_bytes:
        assert 1.0 < sent / (4 * PARAMETERS * steps) < 1.5


@pytest.mark.parametrize(
    ("mischief", "options", "code", "parts"),
    [
        ("kill", [], 137, ["rank 1 of 2 was killed by SIGKILL"]),
        ("raise", [], 1, ["rank 1 of 2 ended with ValueError: bad batch; exit code 1."]),
        ("sleep", ["--stall-secs", "4"], 124, ["rank 0 waiting", "rank 1 missing, it stays at train.py:"]),
        ("stop", [], 124, ["rank 0 waiting", "rank 1 missing, its process is stopped"]),
    ],
)
def test_failure_on_the_other_host_ends_the_job_with_its_reason(hosts, tmp_path, mischief, options, code, parts):
    got, verdict = finish(hosts, start(hosts, tmp_path, FOR_EVER, mischief, options))
    assert got == code
    assert verdict.startswith("npu-run: ") and all(part in verdict for part in parts)
    assert_checkpoint_is_whole(tmp_path)


def test_a_link_that_is_cut_ends_the_job_on_both_hosts(hosts, tmp_path):
    process = start(hosts, tmp_path, FOR_EVER)
    wait_until_running(process, tmp_path)
    hosts.cut()
    got, verdict = finish(hosts, process, limit_secs=40)
    assert got == 255
    assert verdict.startswith("npu-run: rank 1 of 2 was lost: nothing was heard from hostb for 20 s; exit code 255.")
    assert_checkpoint_is_whole(tmp_path)


def test_a_link_that_comes_back_soon_costs_nothing_but_time(hosts, tmp_path):
    process = start(hosts, tmp_path, 300)
    wait_until_running(process, tmp_path)
    hosts.cut()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=6)
    hosts.mend()
    assert finish(hosts, process, limit_secs=90)[0] == 0


def test_the_launcher_takes_everything_with_it(hosts, tmp_path):
    process = start(hosts, tmp_path, FOR_EVER)
    wait_until_running(process, tmp_path)
    process.kill()  # what was started as `ip netns exec` has become npu-run
    assert finish(hosts, process)[0] == -9


def test_hosts_that_cannot_be_reached_are_told_at_once(hosts, tmp_path):
    hosts.cut()
    got, verdict = finish(hosts, start(hosts, tmp_path, 3))
    assert got == 255
    assert verdict.startswith("npu-run: rank 1 of 2 was lost: the connection to hostb has ended (ssh, exit code 255: ")


def wait_until_running(process, folder):
    """Waits until both ranks have made steps."""
    files = [folder / "running.0", folder / "running.1"]
    wait_for(lambda: all(map(pathlib.Path.exists, files)) or process.poll() is not None, "both ranks to train")
    if process.poll() is not None:
        pytest.fail(f"npu-run has ended:\n{process.communicate()[0]}")
