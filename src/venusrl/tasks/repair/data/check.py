"""Verifier of a repair task, run inside the sandbox: prints 1 if the function gives every expected result, else 0.

The code under test is hostile. It runs in a child that learned the calls but not the expected results, that has one
open file (the pipe for its results) and may open no other, a second of CPU and a bounded memory. Only this parent
compares and speaks.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

WALL_SECONDS = 5.0


def child(source: str, function: str, calls: list[list[Any]], pipe: int) -> None:
    os.dup2(pipe, 3)
    os.closerange(4, 64)
    for fd in (0, 1, 2):
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    namespace: dict[str, Any] = {"__name__": "under_test"}
    exec(compile(source, "under_test", "exec"), namespace)
    results: list[Any] = []
    for arguments in calls:
        try:
            results.append(namespace[function](*arguments))
        except Exception as error:  # noqa: BLE001 - a crash is a wrong result, not a verifier failure
            results.append("raised " + type(error).__name__)
    os.write(3, json.dumps(results).encode())
    os._exit(0)


def collect(pipe: int, pid: int) -> bytes:
    """What the child wrote until it closed the pipe, overran its time or wrote too much."""
    data, deadline = b"", time.monotonic() + WALL_SECONDS
    while len(data) < 1 << 16:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(pipe, 4096) if ready else b""
        if not chunk:
            break
        data += chunk
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return data


def same(results: object, expected: object) -> bool:
    """Equal values of equal types: True is not 1."""
    return json.dumps(results) == json.dumps(expected)


def main() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "cases.json")) as file:
        cases = json.load(file)
    expected = cases.pop("expected")
    try:
        with open(os.path.join(sys.argv[1], cases["file"])) as file:
            source = file.read(1 << 16)
    except (OSError, UnicodeDecodeError):
        sys.stdout.write("0\n")
        return
    reader, writer = os.pipe()
    # The expected results leave this process's memory before it forks: the child must not find them in its copy.
    hidden_reader, hidden_writer = os.pipe()
    os.write(hidden_writer, json.dumps(expected).encode())
    os.close(hidden_writer)
    del expected
    pid = os.fork()
    if pid == 0:
        os.close(hidden_reader)
        os.close(reader)
        try:
            child(source, cases["function"], cases["calls"], writer)
        finally:
            os._exit(1)
    os.close(writer)
    data = collect(reader, pid)
    expected = json.loads(os.read(hidden_reader, 1 << 16))
    try:
        results = json.loads(data)
    except ValueError:
        results = None
    sys.stdout.write("1\n" if same(results, expected) else "0\n")


if __name__ == "__main__":
    main()
