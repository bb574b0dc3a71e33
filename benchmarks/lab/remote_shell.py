"""A remote shell for hosts without sshd: runs `ssh HOST COMMAND` over TCP, without the encryption.

    python remote_shell.py serve              answers on every address of this host until it is killed
    python remote_shell.py call HOST COMMAND  runs COMMAND there, with this process's input, output and exit code

It behaves as sshd does for a command without a terminal: the command gets a bare environment; when the caller leaves,
its pipes close, and it continues; a command killed by a signal shows as exit code 255. For tests and benchmarks in
network namespaces only: anyone who reaches the port can run anything.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading

PORT = 22022
_CONNECT_SECS = 10.0
_CHUNK_BYTES = 65536
_HEADER = struct.Struct("!BI")  # stream (0: the exit code, 1: output, 2: errors), length or exit code


def serve() -> None:
    """Answers callers until killed; prints one line once it listens."""
    with socket.create_server(("", PORT), backlog=64) as listener:
        print("listening", flush=True)
        while True:
            caller, _ = listener.accept()
            threading.Thread(target=_answer, args=(caller,), daemon=True).start()


def _answer(caller: socket.socket) -> None:
    with caller, caller.makefile("rb") as incoming:
        (length,) = struct.unpack("!I", incoming.read(4))
        command = incoming.read(length)
        process = subprocess.Popen(
            ["sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        lock = threading.Lock()
        outputs = [
            threading.Thread(target=_pass_output, args=(pipe, stream, caller, lock), daemon=True)
            for stream, pipe in ((1, process.stdout), (2, process.stderr))
        ]
        threading.Thread(target=_pass_input, args=(incoming, process.stdin), daemon=True).start()
        for thread in outputs:
            thread.start()
        code = process.wait()
        for thread in outputs:
            thread.join()
        with contextlib.suppress(OSError):
            caller.sendall(_HEADER.pack(0, code if code >= 0 else 255))
            caller.shutdown(socket.SHUT_RDWR)  # ends the thread that reads the caller's input


def _pass_input(incoming, pipe) -> None:
    with contextlib.suppress(OSError, ValueError), pipe:
        for text in iter(lambda: incoming.read1(_CHUNK_BYTES), b""):
            pipe.write(text)
            pipe.flush()


def _pass_output(pipe, stream: int, caller: socket.socket, lock: threading.Lock) -> None:
    with contextlib.suppress(OSError), pipe:
        for text in iter(lambda: pipe.read1(_CHUNK_BYTES), b""):
            with lock:
                caller.sendall(_HEADER.pack(stream, len(text)) + text)


def call(host: str, command: str) -> int:
    """Runs a command on a host; returns its exit code, 255 when the host cannot be reached."""
    try:
        connection = socket.create_connection((host, PORT), timeout=_CONNECT_SECS)
    except OSError as error:
        print(f"ssh: connect to host {host}: {error}", file=sys.stderr)
        return 255
    connection.settimeout(None)
    text = command.encode()
    connection.sendall(struct.pack("!I", len(text)) + text)
    threading.Thread(target=_send_own_input, args=(connection,), daemon=True).start()
    with connection, connection.makefile("rb") as incoming:
        while header := incoming.read(_HEADER.size):
            stream, number = _HEADER.unpack(header)
            if stream == 0:
                return number
            os.write(stream, incoming.read(number))
    print(f"ssh: connection to {host} closed by remote host", file=sys.stderr)
    return 255


def _send_own_input(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for text in iter(lambda: os.read(0, _CHUNK_BYTES), b""):
            connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)


def main(arguments: list[str]) -> int:
    if arguments[0] == "serve":
        serve()
    _, host, *words = arguments
    return call(host, " ".join(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
