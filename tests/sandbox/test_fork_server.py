from __future__ import annotations

import json
import os
import socket
import struct

import pytest

from opforge.errors import InternalError
from opforge.procs import linux
from opforge.procs.channel import Channel, ChannelClosedError
from opforge.runs.execute.judge_pool import start_server
from opforge.sandbox.host.client import ForkServerProcess, worker_environment


@pytest.fixture(scope="module")
def spawner():
    server = start_server("cpu")
    yield server.spawner
    server.close()


def new_worker(spawner, limits=None):
    arena = os.memfd_create("test")
    os.ftruncate(arena, 1 << 20)
    ours, theirs = Channel.pair()
    config = {"device": "cpu", "arena_bytes": 1 << 20, "results_offset": 1 << 19, "memory": True}
    pid = spawner.spawn("worker", config, [theirs.fileno(), arena], limits=limits or {}, output=False)
    theirs.close()
    os.close(arena)
    message, (memory,) = ours.receive_with_fds(10)
    assert message == {"memory": True}
    os.close(memory)
    return pid, ours


def test_workers_are_fresh_processes_of_their_own_session(spawner):
    first, one = new_worker(spawner)
    second, two = new_worker(spawner)
    assert first != second
    assert os.getsid(first) == first
    assert spawner.stop(first).orphans == 0
    assert spawner.stop(second).orphans == 0
    one.close()
    two.close()


def test_a_worker_inherits_no_descriptor_of_the_server(spawner):
    pid, channel = new_worker(spawner)
    channel.send({"do": "load", "kernel": {"file": None, "primary": "relu.default", "entries": []}})
    assert channel.receive(10) == {}
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if int(fd) > 2]
    assert sum(link.startswith("socket:") for link in links) == 1
    spawner.stop(pid)
    channel.close()


def test_a_worker_ends_when_its_channel_is_closed(spawner):
    pid, channel = new_worker(spawner)
    waiter = os.pidfd_open(pid)
    channel.close()
    import select

    assert select.select([waiter], [], [], 10)[0]
    assert spawner.stop(pid).status == 0
    os.close(waiter)


@pytest.mark.own_server
def test_the_server_takes_all_with_it():
    server = start_server("cpu")
    pid, channel = new_worker(server.spawner)
    waiter = os.pidfd_open(pid)
    server.close()
    import select

    assert select.select([waiter], [], [], 10)[0]
    os.close(waiter)
    channel.close()


@pytest.mark.own_server
def test_what_libraries_of_its_processes_print_is_not_on_stdout():
    """A command's stdout is for its results: oneDNN, for one, writes remarks of its own there."""
    server = start_server("cpu")
    pid, channel = new_worker(server.spawner)
    for process in (server.pid, pid):
        assert os.readlink(f"/proc/{process}/fd/1") == os.readlink("/proc/self/fd/2")
    server.close()
    channel.close()


def test_a_server_that_cannot_start_says_so():
    broken = ForkServerProcess({"worker": "no.such.module:serve"}, {})
    with pytest.raises(InternalError, match="did not start"):
        _ = broken.spawner
    broken.close()


def test_the_environment_of_workers_holds_no_keys(monkeypatch):
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, "secret")
    assert "secret" not in worker_environment().values()


def test_the_environment_of_workers_enables_no_kernels(monkeypatch):
    monkeypatch.setenv("OPFORGE_BACKEND", "some_backend")
    monkeypatch.setenv("OPFORGE_POLICY", "all")
    monkeypatch.setenv("OPFORGE_OTHER", "kept")
    assert {name for name in worker_environment() if name.startswith("OPFORGE_")} & {
        "OPFORGE_BACKEND",
        "OPFORGE_POLICY",
        "OPFORGE_OTHER",
    } == {"OPFORGE_OTHER"}


def test_messages_and_descriptors_cross_a_channel(tmp_path):
    left, right = Channel.pair()
    message = {"text": "é", "numbers": [1, 2.5, None, True], "nested": {"a": []}}
    with (tmp_path / "file").open("w+") as file:
        left.send(message, [file.fileno()])
        received, (fd,) = right.receive_with_fds(5)
        os.write(fd, b"through")
        os.close(fd)
        assert (tmp_path / "file").read_text() == "through"
    assert received == message
    left.close()
    with pytest.raises(ChannelClosedError):
        right.receive(5)
    right.close()


@pytest.mark.parametrize("payload", [b"\x02\x00", struct.pack("<I", 2**31), struct.pack("<I", 10) + b"half"])
def test_half_a_message_and_too_long_a_one_are_refused(payload):
    raw, other = socket.socketpair()
    channel = Channel(other)
    raw.sendall(payload)
    raw.close()
    with pytest.raises(ChannelClosedError):
        channel.receive(5)
    channel.close()


def test_what_is_not_json_is_refused():
    raw, other = socket.socketpair()
    channel = Channel(other)
    raw.sendall(struct.pack("<I", 3) + b"{x}")
    with pytest.raises(json.JSONDecodeError):
        channel.receive(5)
    raw.close()
    channel.close()


def test_neither_a_trickle_nor_a_deaf_reader_can_hold_a_channel_up():
    raw, other = socket.socketpair()
    channel = Channel(other)
    raw.sendall(struct.pack("<I", 100) + b"[")
    with pytest.raises(TimeoutError):
        channel.receive(0.2)
    with pytest.raises(TimeoutError):
        channel.send("x" * (8 << 20), timeout_s=0.2)
    raw.close()
    channel.close()


def test_no_two_workers_have_one_mark():
    """What one has too many of is not laid to the charge of another's, of whatever server it is."""
    marks = {linux.new_mark() for _ in range(2000)}
    assert len(marks) == 2000
    assert min(marks) > 0
