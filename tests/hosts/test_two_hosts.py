"""Jobs over two hosts with a link of 1 Gbit/s between them: they train, and they end well when something fails."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

from tests.goldens.models import adasum_tree
from tests.hosts import train_by_adasum
from tests.npu_run.launching import LIMIT_SECS, read_until, wait_for, write_script

pytestmark = [
    pytest.mark.slow("two hosts, whose link is shaped and cut; make test-hosts"),
    pytest.mark.hosts,
    pytest.mark.ranks(2),
    pytest.mark.timeout(900),
]

TRAIN = pathlib.Path(__file__).with_name("train.py")
TRAIN_BY_ADASUM = TRAIN.with_name("train_by_adasum.py")
PARAMETERS = 3125 + 250_000
FOR_EVER = 1_000_000


def start(hosts, folder, steps, mischief="", options=()):
    return hosts.start_ranks(TRAIN, folder, steps, *filter(None, [mischief]), options=options)


def finish(hosts, process, limit_secs=LIMIT_SECS):
    """Waits for the end; gives exit code and last line, after checking that nothing stays behind on either host."""
    try:
        text, _ = process.communicate(timeout=limit_secs)
    except subprocess.TimeoutExpired:
        hosts.end_all_processes()
        pytest.fail(f"npu-run did not end within {limit_secs} s. Its output:\n{process.communicate()[0]}")
    print(text)
    wait_for(lambda: not hosts.process_ids(0) + hosts.process_ids(1), "both hosts to be empty")
    return process.returncode, (text.splitlines() or [""])[-1]


def assert_checkpoint_is_whole(folder):
    reader = tf.train.load_checkpoint(str(folder))
    assert reader.get_tensor("global_step") > 0
    assert reader.get_tensor("weight").shape == (3125,) and reader.get_tensor("ballast").shape == (250_000,)


def test_ranks_on_two_hosts_train_one_model_also_when_the_link_is_gone_for_a_moment(hosts, tmp_path):
    steps = 240  # many more than are made while the link is being cut
    before = hosts.sent_bytes()
    process = start(hosts, tmp_path, steps, options=["--logs", "--out", tmp_path / "logs"])
    wait_until_running(process, tmp_path)
    hosts.cut()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    hosts.fix()
    (tmp_path / "go").touch()
    assert finish(hosts, process)[0] == 0
    logs = [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    first, last = zip(*([float(text) for text in re.findall(r"^loss (\S+)$", log, re.M)] for log in logs))
    assert all(after < before / 2 for before, after in zip(first, last))
    (name_0, weights_0), (name_1, weights_1) = (
        re.search(r"^host (\S+) weights (\S+)$", log, re.M).groups() for log in logs
    )
    assert (name_0, name_1) == ("hosta", "hostb")
    assert weights_0 == weights_1
    assert tf.train.load_checkpoint(str(tmp_path)).get_tensor("global_step") == steps
    # On two ranks a ring sends every byte once in each direction; what was lost is sent again.
    for sent, earlier in zip(hosts.sent_bytes(), before):
        assert 1.0 < (sent - earlier) / (4 * PARAMETERS * steps) < 1.5


@pytest.mark.parametrize(
    ("mischief", "code", "told"),
    [
        ("raise", 1, r"rank 1 of 2 ended with ValueError: bad batch; exit code 1\."),
        ("kill", 137, r"rank 1 of 2 was killed by SIGKILL"),
        ("stop", 124, r".*rank 0 waiting.*rank 1 missing, its process is stopped"),
    ],
)
def test_a_failure_on_the_other_host_ends_the_job_with_its_reason(hosts, tmp_path, mischief, code, told):
    got, verdict = finish(hosts, start(hosts, tmp_path, FOR_EVER, mischief))
    assert got == code
    assert re.match(f"npu-run: {told}", verdict), verdict
    assert_checkpoint_is_whole(tmp_path)


def test_a_link_that_is_cut_ends_the_job_on_both_hosts(hosts, tmp_path):
    process = start(hosts, tmp_path, FOR_EVER)
    wait_until_running(process, tmp_path)
    hosts.cut()
    got, verdict = finish(hosts, process)
    assert got == 255
    assert verdict.startswith("npu-run: rank 1 of 2 was lost: nothing was heard from hostb for 20 s; exit code 255.")
    assert_checkpoint_is_whole(tmp_path)


def test_an_elastic_job_goes_on_without_a_host_that_is_lost(hosts, tmp_path):
    process = start(hosts, tmp_path, 240, options=["--min-np", "1", "--cool-down", "1000"])
    wait_until_running(process, tmp_path)
    hosts.cut()
    said = read_until(process, "npu-run: 1 rank on hosta:1\n")
    assert "rank 1 of 2 was lost: nothing was heard from hostb for 20 s" in said
    hosts.fix()
    (tmp_path / "go").touch()
    got, last = finish(hosts, process)
    assert got == 0
    assert re.match(r"host hosta weights \w+$", last), last


def test_hosts_that_cannot_be_reached_are_told_at_once(hosts, tmp_path):
    hosts.cut()
    got, verdict = finish(hosts, hosts.start_ranks(write_waiting(tmp_path)))
    assert got == 255
    assert verdict.startswith("npu-run: rank 1 of 2 was lost: the connection to hostb has ended (ssh, exit code 255: ")


def test_ranks_meet_on_the_link_between_them_and_a_stranger_on_it_is_refused(hosts, tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, pathlib, time
        place = pathlib.Path(__file__).with_name("place")
        if os.environ["RANK_ID"] == "1":
            place.with_suffix(".new").write_text(os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"])
            place.with_suffix(".new").rename(place)
        while not place.with_name("knocked").exists():
            time.sleep(0.02)
        """,
    )
    process = hosts.start_ranks(script)
    wait_for((tmp_path / "place").exists, "the job to be up")
    address, _, secret = (tmp_path / "place").read_text().partition("/")
    host, _, port = address.partition(":")
    assert host == hosts.addresses[0] and len(secret) >= 32
    knock = "import socket, sys\n" + textwrap.dedent("""
        for host in sys.argv[2:]:
            try:
                with socket.create_connection((host, int(sys.argv[1])), timeout=5) as stranger:
                    stranger.sendall(b"GET /global/0 HTTP/1.1\\r\\n\\r\\n")
                    print("closed" if stranger.recv(100) == b"" else "answered")
            except ConnectionRefusedError:
                print("no such door")
    """)
    words = hosts.command(1, sys.executable, "-S", "-c", knock, port, host)
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "closed\n"
    words = hosts.command(0, sys.executable, "-S", "-c", knock, port, "127.0.0.1")
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "no such door\n"
    (tmp_path / "knocked").touch()
    got, last = finish(hosts, process)
    assert got == 0
    assert last == "npu-run: 1 request(s) at the rendezvous server without this job's secret were refused"


STRANGERS = r"""
import os, socket, sys
host, port, source, count = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
texts = [b"", b"GET / HTTP/1.1\r\n\r\n", preface + os.urandom(200), os.urandom(5000)]
held, reached = [], 0
for number in range(count):
    stranger = socket.socket()
    stranger.settimeout(0.5)
    stranger.bind((source, 0))
    if stranger.connect_ex((host, port)) == 0:
        stranger.sendall(texts[number % len(texts)])
        reached += 1
    held += [stranger] if number % 5 == 0 else []
print(reached)
"""


def open_ports(hosts):
    """Returns the ports of the first host on which something listens at all addresses."""
    words = hosts.command(0, "cat", "/proc/net/tcp", "/proc/net/tcp6")
    rows = [line.split() for line in subprocess.run(words, capture_output=True, text=True).stdout.splitlines()]
    places = [row[1].partition(":") for row in rows if row[3] == "0A"]
    return {int(port, 16) for address, _, port in places if set(address) == {"0"}}


@pytest.mark.parametrize("hosts", ["tensorflow"], indirect=True)
def test_strangers_at_the_servers_change_no_number(hosts, tmp_path):
    """A stranger gets in only with an address of a host, and says nothing that a server understands."""
    subprocess.run(hosts.command(1, "ip", "address", "replace", "10.201.0.99/24", "dev", "eth0"), check=True)
    others, weights = open_ports(hosts), []
    for sources in ({}, {hosts.addresses[1]: 300, "10.201.0.99": 10}):
        folder = tmp_path / str(len(sources))
        folder.mkdir()
        process = start(hosts, folder, 40)
        wait_until_running(process, folder)
        (port,) = open_ports(hosts) - others
        for source, count in sources.items():
            words = hosts.command(1, sys.executable, "-S", "-c", STRANGERS, hosts.addresses[0], port, source, count)
            reached = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
            assert reached == (count if source in hosts.addresses else 0)
        (folder / "go").touch()
        text, _ = process.communicate(timeout=LIMIT_SECS)
        assert process.returncode == 0, text
        weights += re.findall(r"weights (\S+)", text)
    assert len(weights) == 4 and len(set(weights)) == 1


def test_two_hosts_combine_what_their_updates_changed(hosts, tmp_path):
    """Ranks of a host average their gradients, which stay on that host; the hosts combine updates by Adasum."""
    job = hosts.run_ranks(
        TRAIN_BY_ADASUM, slots=2, options=["--logs", "--out", tmp_path / "logs"], limit_secs=LIMIT_SECS
    )
    assert job.exit_code == 0, job.text
    logs = [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in range(4)]
    found = [json.loads(re.search(r"^result (.*)$", log, re.M)[1]) for log in logs]
    grads = [train_by_adasum.gradients_of(rank) for rank in range(4)]
    weights, velocities = np.zeros(train_by_adasum.PARAMETERS), np.zeros([2, train_by_adasum.PARAMETERS])
    for step in range(train_by_adasum.STEPS):
        for host in (0, 1):
            mean = (grads[2 * host][step] + grads[2 * host + 1][step]) / 2
            velocities[host] = train_by_adasum.MOMENTUM * velocities[host] + mean
        weights -= adasum_tree(list(train_by_adasum.RATE * velocities))
    shown = slice(None, None, train_by_adasum.PARAMETERS // 100)
    for rank, (ours, velocity, digest) in enumerate(found):
        np.testing.assert_allclose(ours, weights[shown], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(velocity, velocities[rank // 2][shown], rtol=1e-4, atol=1e-5)
        assert digest == found[0][2], "weights differ between ranks"
    # Horovod sends half of the updates up, and three of four pieces of the result. TensorFlow's operators send whole
    # tensors where Horovod sends pieces.
    most = 2.0 if os.environ["NPU_COLLECTIVES"] == "horovod" else 7.0
    for sent in job.sent_bytes:
        assert 1.2 < sent / (4 * train_by_adasum.PARAMETERS * train_by_adasum.STEPS) < most


def write_waiting(folder):
    """A script that needs no TensorFlow, says that it runs and waits."""
    return write_script(
        folder,
        """
        import os, pathlib, time
        pathlib.Path(__file__).with_name(f"running.{os.environ['RANK_ID']}").touch()
        time.sleep(600)
        """,
    )


def wait_until_running(process, folder):
    files = [folder / "running.0", folder / "running.1"]
    wait_for(lambda: all(map(pathlib.Path.exists, files)) or process.poll() is not None, "both ranks to train")
    if process.poll() is not None:
        pytest.fail(f"npu-run has ended:\n{process.communicate()[0]}")
