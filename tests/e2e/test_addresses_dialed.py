"""Unix sockets, IPv6, and from where a learner dials: real servers and learners on this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat

import numpy as np
import pytest

from syncer.config import Config
from syncer.errors import ConfigError
from syncer.exits import Exit
from syncer.learner import Learner
from syncer.learner.dialing import Dialer, dial
from syncer.learner.lines import WORTH_A_RATE
from syncer.reader import pull
from syncer.server.addresses import BindError
from syncer.server.unix_place import UnixPlace
from syncer.tcp import link
from tests.e2e.scripted import ServerProcess, ServerThread

from .waiting import step_until, until

STEPS = 4


@pytest.fixture
def path(tmp_path):
    """Of a Unix socket: that of pytest may be too long."""
    found = tmp_path / "s"
    if len(os.fsencode(found)) < 90:
        yield str(found)
        return
    short = f"/tmp/syncer-test-{os.urandom(6).hex()}"
    yield short
    with contextlib.suppress(FileNotFoundError):
        os.unlink(short)


def values(count: int = 6) -> dict[str, np.ndarray]:
    return {"w": np.arange(count, dtype=np.float32)}


def train(address: str, count: int = 6, **options) -> dict[str, np.ndarray]:
    """One learner to the end of its run."""
    parameters = values(count)
    with Learner(parameters, address, learner_id=0, dtype="f32", fragments=1, num_streams=2,
                 **options) as learner:
        step_until(learner, lambda status: status.finished)
        learner.finish()
    return parameters


# ------------------------------------------------------------------------------ Unix sockets
def test_a_run_over_a_unix_socket(tmp_path, path):
    with ServerThread(tmp_path, total_steps=STEPS, listen=f"unix:{path}") as server:
        listening = server.log.wait("syncer listening")
        assert f"unix:{path}" in listening["addresses"].split(",")
        assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
        train(f"unix:{path}")
        assert server.wait() == Exit.DONE
        introduced = server.log.find("learner has introduced itself")[0]
        assert introduced["peer"] == f"unix:{os.getpid()}"
        assert server.log.find("the way to a learner")[0]["local"] == f"unix:{path}"
    assert not os.path.exists(path)
    assert not os.path.exists(f"{path}.lock")


def test_a_reader_over_a_unix_socket(tmp_path, path):
    with ServerThread(tmp_path, total_steps=10**6, listen=f"unix:{path}") as server:
        with Learner(values(), f"unix:{path}", learner_id=0, dtype="f32", fragments=1) as learner:
            step_until(learner, lambda status: status.versions[0] > 0)
            assert pull(f"unix:{path}").step > 0
        server.server.stop()


def test_what_a_killed_server_has_left_is_taken_over(tmp_path, path):
    with ServerProcess(tmp_path, "--listen", f"unix:{path}") as server:
        server.signal(signal.SIGKILL)
        server.wait()
    assert stat.S_ISSOCK(os.lstat(path).st_mode)
    with pytest.raises(OSError, match="refused"):
        dial(path, 5.0)
    with ServerProcess(tmp_path, "--listen", f"unix:{path}"):
        dial(path, 5.0).close()


def test_two_servers_on_one_path(tmp_path, path):
    with ServerThread(tmp_path, listen=f"unix:{path}") as server:
        with ServerProcess(tmp_path, "--listen", f"unix:{path}", wait=False) as second:
            assert second.wait() == Exit.NOT_BINDABLE
            text = second.log.text()
        assert f"--listen {path} is in use by process {os.getpid()}" in text
        assert len(text.splitlines()) == 1
        dial(path, 5.0).close()  # the first one is still there
        server.server.stop()


def test_what_is_no_socket_of_a_server_stays(path):
    with open(path, "w", encoding="ascii") as file:
        file.write("mine")
    with pytest.raises(BindError, match="is a file and no socket: it stays; name another path"):
        UnixPlace(path)
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as other:  # of another program, without a lock
        other.bind(path)
        other.listen()
        with pytest.raises(BindError, match="is in use by another program; stop it or name"):
            UnixPlace(path)
    os.unlink(path)
    place = UnixPlace(path)
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as other:  # who has taken the path meanwhile keeps it
        other.bind(path)
        place.close()
        assert os.path.exists(path)
    os.unlink(path)


def test_a_directory_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(BindError, match=r"^--listen /no/such/place/s cannot be locked with"):
        UnixPlace("/no/such/place/s")


@pytest.mark.parametrize(("path", "why"), [
    ("run.sock", "its path must be absolute"), ("", "its path must be absolute"),
    ("/" + 107 * "x", "its path has 108 bytes, and the system takes 107: choose a shorter one")])
def test_paths_that_no_socket_can_have(path, why):
    with pytest.raises(ConfigError, match=why):
        Dialer(f"unix:{path}")
    with pytest.raises(ConfigError, match="--listen"):
        Config(learners=1, total_steps=1, listen=f"unix:{path}")


def test_the_longest_path_is_listened_on_and_dialed(tmp_path, path):
    longest = os.path.dirname(path) + "/"
    longest += "x" * (107 - len(os.fsencode(longest)) - len(".lock"))
    for name in (longest, longest + 5 * "x"):
        place = UnixPlace(name)
        dial(name, 5.0).close()
        place.close()


# --------------------------------------------------------------------------------------- IPv6
def test_a_run_over_ipv6(tmp_path):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error.strerror}")
    with ServerThread(tmp_path, total_steps=STEPS, host="::1") as server:
        assert server.log.wait("syncer listening")["addresses"] == f"[::1]:{server.port}"
        train(f"[::1]:{server.port}", local_address="::1")
        assert server.wait() == Exit.DONE
        assert server.log.find("learner has introduced itself")[0]["peer"].startswith("[::1]:")
        assert server.log.find("the way to a learner")[0]["local"] == f"[::1]:{server.port}"


# ---------------------------------------------------------------------------- from where to dial
def test_a_learner_dials_from_where_it_is_told_and_both_sides_say_so(tmp_path, stderr):
    """With the rate that the kernel has measured."""
    count = WORTH_A_RATE // 4 + 1
    with ServerThread(tmp_path, total_steps=STEPS) as server:
        address = f"127.0.0.1:{server.port}"
        train(address, count, local_address="127.0.0.2")
        assert server.wait() == Exit.DONE
        assert server.log.find("learner has introduced itself")[0]["peer"].startswith("127.0.0.2:")
        ended = server.log.find("the way to a learner")[0]
        assert ended["local"] == address
        assert ended["mb_per_s"] > 0 or not kernel_measures()
        line = until(lambda: next((line for line in stderr.getvalue().splitlines()
                                   if "last seen at" in line), None), "the line about the link")
    assert "127.0.0.2:" in line
    assert f" MB to {address}, last seen at " in line
    assert not line.endswith(" 0 MB/s") or not kernel_measures()


def kernel_measures() -> bool:
    """Whether this system tells how fast a connection has been."""
    with (socket.create_server(("127.0.0.1", 0)) as listening,
          socket.create_connection(listening.getsockname()) as one):
        other, _ = listening.accept()
        with other:
            for _ in range(64):
                one.sendall(bytes(1 << 14))
                rest = 1 << 14
                while rest:
                    rest -= len(other.recv(rest))
            return link([one]).mb_per_s > 0


def test_a_learner_dials_through_an_interface(tmp_path):
    with ServerThread(tmp_path, total_steps=STEPS) as server:
        try:
            dial(("127.0.0.1", server.port), 5.0, "lo").close()
        except OSError as error:
            server.server.stop()
            pytest.skip(f"a socket cannot be bound to an interface here: {error.strerror}")
        train(f"127.0.0.1:{server.port}", local_address="lo")
        assert server.wait() == Exit.DONE


def test_where_nobody_can_dial_from():
    with pytest.raises(ConfigError, match=r"'eth77' is neither an address nor an interface of "
                                          r"this machine: give an address, or one of .*lo"):
        Dialer("127.0.0.1:1", "eth77")
    with pytest.raises(ConfigError, match="has no effect with unix:/s: leave it out"):
        Dialer("unix:/s", "127.0.0.1")
    with pytest.raises(OSError, match=r".") as found:
        Dialer("127.0.0.1:1", "192.0.2.77").dial(5.0)
    assert found.value.errno == errno.EADDRNOTAVAIL
