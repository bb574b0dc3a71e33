"""The server at which ranks meet, and a stranger at its door."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import urllib.error
import urllib.request
from concurrent import futures

import pytest

from npu_bridge.collective.rendezvous import key_value_server
from npu_bridge.collective.rendezvous.key_value_server import KeyValueServer, read_host, read_secret
from npu_bridge.collective.rendezvous.key_value_store import KeyValueStore
from tests.npu_run.launching import needs_horovod, npu_run, wait_for, write_script


@pytest.fixture
def server():
    running = KeyValueServer()
    yield running
    running.stop()


def ask(location, key, method="GET", value=None):
    """A request as Horovod's client and our own put it together."""
    request = urllib.request.Request(f"http://{location.address}:{location.port}/{key}", data=value, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=20) as answer:
        return answer.read()


def answer_to(location, text):
    """Returns the server's answer to a stranger who sends some bytes."""
    with socket.create_connection((read_host(location.address), location.port), timeout=20) as stranger:
        answer = b""
        try:
            stranger.sendall(text)
            stranger.shutdown(socket.SHUT_WR)
            while piece := stranger.recv(4096):
                answer += piece
        except (ConnectionResetError, BrokenPipeError):
            pass
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # the server hung up before all was sent
                raise
        return answer


def test_values_are_kept_replaced_and_removed(server):
    location = server.listen("127.0.0.1")
    assert location == server.listen("127.0.0.1")
    for value in (b"", b"first", b"\xff" * 100_000):
        ask(location, "global/0", "PUT", value)
        assert ask(location, "global/0") == value
    ask(location, "global/0", "DELETE")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(location, "global/0")
    assert server.refused == 0


def test_a_stranger_gets_no_answer_leaves_no_trace_and_is_counted(server, capfd):
    location = server.listen("127.0.0.1")
    ask(location, "global/0", "PUT", b"ours")
    secret = read_secret(location.address)
    knocks = [
        b"GET /global/0 HTTP/1.1\r\n\r\n",
        b"GET /%s/global/0 HTTP/1.1\r\n\r\n" % (b"0" * len(secret)),
        b"GET /%s HTTP/1.1\r\n\r\n" % secret[:-1].encode(),
        b"PUT /global/0 HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n" + b"x" * 1_000_000,
        b"DELETE /global/0 HTTP/1.1\r\n\r\n",
        b"POST /%s/global/0 HTTP/1.1\r\n\r\n" % secret.encode(),
        b"GET /\xff\xfe/global/0 HTTP/1.1\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00junk\r\n\r\n",
        b"x" * 100_000,
        b"no end",
        b"",
    ]
    for knock in knocks:
        assert answer_to(location, knock) == b"", knock
    wait_for(lambda: server.refused == len(knocks), "all to be counted", limit_secs=60)
    assert ask(location, "global/0") == b"ours"
    # Others in this process may print, too.
    printed = "".join(capfd.readouterr())
    assert not [word for word in ("Traceback", "HTTP", "GET", "PUT", "127.0.0.1") if word in printed], printed


def test_a_stranger_who_says_nothing_is_not_waited_for_long(server, monkeypatch):
    monkeypatch.setattr(key_value_server, "_HEAD_SECS", 0.2)
    location = server.listen("127.0.0.1")
    with socket.create_connection(("127.0.0.1", location.port), timeout=20) as stranger:
        assert stranger.recv(1) == b""
    assert server.refused == 1


def test_a_rank_that_stood_still_meanwhile_asks_again(server, monkeypatch):
    host = server.listen("127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", host.address)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(host.port))
    for call in (lambda store: store.put(1, "there"), lambda store: store.get(1)):
        monkeypatch.setattr(key_value_server, "_HEAD_SECS", 0.0)
        monkeypatch.setattr(server, "count_refused", lambda: monkeypatch.setattr(key_value_server, "_HEAD_SECS", 300.0))
        result = call(KeyValueStore("of_test"))
    assert result == "there"
    server.stop()
    with pytest.raises(OSError):
        KeyValueStore("of_test").get(1)


def test_what_a_member_may_store_is_bounded_too(server, monkeypatch):
    monkeypatch.setattr(key_value_server, "_VALUE_BYTES", 1000)
    monkeypatch.setattr(key_value_server, "_STORE_BYTES", 2500)
    location = server.listen("127.0.0.1")
    for _ in range(5):  # what is replaced is not counted twice
        ask(location, "a/0", "PUT", b"x" * 1000)
    ask(location, "a/1", "PUT", b"x" * 1000)
    for key, size in (("a/2", 1001), ("a/3", 900)):
        with pytest.raises(urllib.error.HTTPError, match="413"):
            ask(location, key, "PUT", b"x" * size)
    ask(location, "a/0", "DELETE")
    ask(location, "a/3", "PUT", b"x" * 900)


def test_one_server_has_a_port_on_each_address_it_is_asked_for(server):
    here, there = server.listen("127.0.0.1"), server.listen("127.0.0.2")
    named = server.listen("127.0.0.2", name="localhost")
    assert [read_host(of.address) for of in (here, there, named)] == ["127.0.0.1", "127.0.0.2", "localhost"]
    ask(here, "a/0", "PUT", b"x")
    assert ask(there, "a/0") == b"x"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", here.port), timeout=5)


@needs_horovod
@pytest.mark.ranks(2)
def test_a_local_job_listens_on_loopback_alone_and_says_once_that_strangers_came(tmp_path):
    write_script(
        tmp_path,
        """
        import os, socket
        host, _, secret = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")
        port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        with open("/proc/net/tcp") as file:
            lines = [line.split() for line in file][1:]
        listening = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]
        if os.environ["RANK_ID"] == "0":
            print(host == f"127.0.0.1:{port}", len(secret) >= 32, listening == [f"0100007F:{port:04X}"])
            for text in (b"junk\\r\\n\\r\\n", b"GET /global/0 HTTP/1.1\\r\\n\\r\\n"):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(text)
                    assert stranger.recv(1) == b""
        """,
    )
    # A secret of an earlier job is not valid here.
    code, output = npu_run("-np", "2", "train.py", cwd=tmp_path, HOROVOD_GLOO_RENDEZVOUS_ADDR="10.0.0.1:1/old")
    assert code == 0
    assert output.splitlines() == [
        "True True True",
        "npu-run: 2 request(s) at the rendezvous server without this job's secret were refused",
    ]
    assert os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") is None


def test_many_requests_at_once_are_answered_beside_strangers_who_say_nothing(server, monkeypatch):
    monkeypatch.setattr(key_value_server, "_HEAD_SECS", 300.0)  # the strangers are there to the end
    location = server.listen("127.0.0.1")
    with contextlib.ExitStack() as strangers, futures.ThreadPoolExecutor(64) as pool:
        for _ in range(20):
            strangers.enter_context(socket.create_connection(("127.0.0.1", location.port), timeout=20))
        list(pool.map(lambda rank: ask(location, f"a/{rank}", "PUT", b"%d" % rank), range(300)))
        assert list(pool.map(lambda rank: ask(location, f"a/{rank}"), range(300))) == [b"%d" % n for n in range(300)]
        assert server.refused == 0


def test_a_stopped_server_has_no_threads_and_no_port(server):
    location = server.listen("127.0.0.1")
    ask(location, "a/0", "PUT", b"x")
    server.stop()
    wait_for(lambda: all(thread.name != "key-value server" for thread in threading.enumerate()), "threads to end", 60)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", location.port), timeout=5)
