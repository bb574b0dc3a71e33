"""Canaries of `npu_bridge/base/tf_internals/servers.py`, in a process that has made no tensor yet."""

from __future__ import annotations

import subprocess
import sys

from npu_bridge.base.tf_internals import servers
from tests.canaries import canary_of, expect

_ALONE = """
import socket
import tensorflow as tf
from tensorflow.core.protobuf import cluster_pb2, tensorflow_server_pb2
from npu_bridge.base.tf_internals import servers

port = socket.socket()
port.bind(("127.0.0.1", 0))
address = f"127.0.0.1:{port.getsockname()[1]}"
port.close()
told = []


def describe(config):
    cluster = cluster_pb2.ClusterDef()
    cluster.job.add(name="alone").tasks[0] = address
    told.append(type(config).__name__)
    return tensorflow_server_pb2.ServerDef(
        cluster=cluster, job_name="alone", protocol="grpc", default_session_config=config
    )


servers.serve_from_first_use(describe, lambda: told.append("started"))
assert told == [], told
servers.start_serving()
servers.start_serving()
assert told == ["ConfigProto", "started"], told
assert tf.constant(1.0).device.startswith("/job:alone/"), tf.constant(1.0).device
with tf.Graph().as_default(), tf.compat.v1.Session(f"grpc://{address}") as session:
    assert session.run(tf.constant(2.0)) == 2.0
"""


@canary_of(servers.serve_from_first_use, servers.start_serving)
def _():
    done = subprocess.run([sys.executable, "-c", _ALONE], capture_output=True, text=True, timeout=120)
    expect(done.returncode == 0, done.stderr[-300:])
