"""What an address means, with the real system: every address of a name, and what can be dialed."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from syncer.server.addresses import EVERY, BindError, listen, reachable
from syncer.server.system import System


class Named(System):
    """A machine on which `two` is a name of several addresses."""

    addresses = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.0.2"))

    def resolve(self, host, port):
        if host != "two":
            return super().resolve(host, port)
        return [(family, (address, port)) for family, address in self.addresses]


@pytest.fixture
def opened():
    socks = []
    yield socks
    for sock in socks:
        sock.close()


def dial(where: str) -> None:
    host, _, port = where.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=60).close()


def test_every_address_of_a_name_is_listened_on(opened):
    opened += listen(Named(), "two", 0)
    hosts = [sock.getsockname() for sock in opened]
    assert [host for host, _ in hosts] == ["127.0.0.1", "127.0.0.2"]
    assert hosts[0][1] == hosts[1][1]
    found = reachable(System(), opened)
    assert found == [f"{host}:{hosts[0][1]}" for host, _ in hosts]
    for where in found:
        dial(where)


def test_localhost_is_all_that_it_means_here(opened):
    opened += listen(System(), "localhost", 0)
    port = opened[0].getsockname()[1]
    dialed = 0
    for family, _, _, _, address in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM):
        with socket.socket(family) as sock:
            number = sock.connect_ex(address)
        assert number in (0, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT), os.strerror(number)
        dialed += not number
    assert dialed == len({sock.getsockname() for sock in opened})


def test_an_address_that_is_not_there_does_not_count(opened, monkeypatch):
    absent = (socket.AF_INET, "192.0.2.77")
    monkeypatch.setattr(Named, "addresses", [absent, *Named.addresses])
    opened += listen(Named(), "two", 0)
    assert len(opened) == 2
    monkeypatch.setattr(Named, "addresses", [absent])
    with pytest.raises(BindError, match=r"^two:0 cannot be listened on: .*; choose another --host"):
        listen(Named(), "two", 0)


def test_a_port_must_be_free_on_all_of_them(opened):
    opened.append(socket.create_server(("127.0.0.2", 0)))
    port = opened[0].getsockname()[1]
    with pytest.raises(BindError, match=f"^two:{port} is in use by another program"):
        listen(Named(), "two", port)
    with socket.create_server(("127.0.0.1", port)):  # it was given back
        pass


def test_a_free_port_is_looked_for_until_all_have_it(opened, monkeypatch):
    refused = []

    class Busy(Named):
        def bind(self, family, address):
            if address[0] == "127.0.0.2" and len(refused) < 5:
                refused.append(address[1])
                raise OSError(errno.EADDRINUSE, "in use")
            return super().bind(family, address)

    opened += listen(Busy(), "two", 0)
    assert len(refused) == 5
    assert len({sock.getsockname()[1] for sock in opened}) == 1


@pytest.mark.parametrize("host", EVERY)
def test_of_every_address_those_are_shown_that_can_be_dialed(opened, host):
    try:
        opened += listen(System(), host, 0)
    except BindError:
        pytest.skip(f"this machine has no {host}")
    found = reachable(System(), opened)
    assert found
    assert not any(where.startswith(("0.0.0.0:", "[::]:")) for where in found)
    for where in found:
        dial(where)


def test_a_machine_without_a_network_shows_its_loopback(opened, monkeypatch):
    monkeypatch.setattr(System, "own_addresses", lambda self: [])
    opened += listen(System(), "0.0.0.0", 0)
    assert reachable(System(), opened) == [f"127.0.0.1:{opened[0].getsockname()[1]}"]


def test_a_name_that_nobody_knows_is_one_sentence():
    with pytest.raises(BindError, match=r"^--host no\.such\.name\.invalid cannot be listened on: "):
        listen(System(), "no.such.name.invalid", 0)
