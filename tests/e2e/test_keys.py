"""`syncer keys`: what it makes is what TLS takes, and what it says of it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("cryptography",
                    reason="certificates are made with cryptography: pip install '.[tls]'")

from syncer.cli import main
from syncer.exits import Exit
from syncer.learner import ConnectionFailed, Learner
from tests.e2e.scripted import ROOT, ServerThread
from tests.e2e.waiting import step_until


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Made by the command, for two learners."""
    directory = tmp_path_factory.mktemp("fleet") / "keys"
    assert main(["keys", "init", str(directory), "--host", "server.example", "--host", "10.1.2.3",
                 "--learners", "2"]) == Exit.DONE
    return directory


def train(port: int, file, learner: int = 0) -> None:
    with Learner({"w": np.ones(3, np.float32)}, f"127.0.0.1:{port}", learner_id=learner,
                 dtype="f32", fragments=1, tls=file) as one:
        step_until(one, lambda status: status.finished)
        one.finish()


def flags(fleet, **more) -> dict[str, str]:
    server = str(fleet / "server.pem")
    return dict(tls_cert=server, tls_key=server, tls_client_ca=str(fleet / "ca.pem"), **more)


def test_a_fleet_is_secure_with_what_two_commands_make(tmp_path, fleet, capsys):
    assert main(["keys", "learner", str(fleet), "eval"]) == Exit.DONE
    assert capsys.readouterr().out == f"{fleet / 'eval.pem'}: for eval alone, as tls= or --tls\n"
    settings = flags(fleet, tls_learner_names="learner-{id}")
    with ServerThread(tmp_path, total_steps=2, **settings) as server:
        with pytest.raises(ConnectionFailed, match="called learner-0 "):
            train(server.port, fleet / "eval.pem")
        train(server.port, fleet / "learner-0.pem")
        assert server.wait() == Exit.DONE


def test_a_learner_cannot_be_the_server_nor_the_server_a_learner(tmp_path, fleet):
    with ServerThread(tmp_path, **flags(fleet)) as server:
        with pytest.raises(ConnectionFailed, match="certificate"):
            train(server.port, fleet / "server.pem")
        server.server.stop()
    learner = str(fleet / "learner-1.pem")
    settings = flags(fleet) | dict(tls_cert=learner, tls_key=learner)
    with ServerThread(tmp_path, **settings) as server:
        with pytest.raises(ConnectionFailed, match="not accepted"):
            train(server.port, fleet / "learner-0.pem")
        server.server.stop()


def test_files_are_for_their_owner_and_are_never_replaced(fleet, capsys):
    for name in ("ca-key.pem", "server.pem", "learner-0.pem", "learner-1.pem"):
        assert stat.S_IMODE(os.lstat(fleet / name).st_mode) == 0o600
    before = {path: path.read_bytes() for path in fleet.iterdir()}
    for words in (["init", str(fleet)], ["learner", str(fleet), "learner-1"]):
        assert main(["keys", *words]) == Exit.UNUSABLE
        assert "is there already and stays: remove it first" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_what_certificates_say(fleet, capsys):
    assert main(["keys", "show", *(str(fleet / name) for name in
                                   ("ca.pem", "server.pem", "learner-1.pem"))]) == Exit.DONE
    authority, server, learner = capsys.readouterr().out.splitlines()
    assert "for an authority; signed by syncer fleet keys; until " in authority
    assert authority.endswith("without a private key")
    assert "server.example, 10.1.2.3, localhost, 127.0.0.1, ::1; for a server; " in server
    assert "learner-1; for a learner or reader; signed by syncer fleet keys; until " in learner
    assert "(364 days); with a private key" in learner


@pytest.mark.parametrize(("words", "why"), [
    (["learner", "/no/such/place", "x"], "has no authority that can be used"),
    (["learner", "FLEET", "a/b"], "is no name for a certificate"),
    (["learner", "FLEET", "server"], "is no name for a certificate"),
    (["init", "NEW", "--host", "a..b"], "is neither a name nor an address of a host"),
    (["init", "/proc/none"], "cannot be made"),
    (["show", "/no/such/file"], "cannot be read"),
    (["show", "/dev/null"], "has no certificate in PEM")])
def test_what_cannot_be_used_is_one_sentence(fleet, tmp_path, capsys, words, why):
    places = {"FLEET": str(fleet), "NEW": str(tmp_path / "new")}
    assert main(["keys", *(places.get(word, word) for word in words)]) == Exit.UNUSABLE
    said = capsys.readouterr().err
    assert why in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("words", [["init", "x", "--days", "0"], ["init", "x", "--learners", "-1"]])
def test_numbers_have_a_range(words, capsys):
    assert main(["keys", *words]) == Exit.UNUSABLE
    assert "is no number of" in capsys.readouterr().err


def test_without_the_package_a_sentence_says_what_to_install(tmp_path):
    (tmp_path / "cryptography.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run([sys.executable, "-m", "syncer", "keys", "init", str(tmp_path / "k")],
                          cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True, check=False)
    assert done.returncode == Exit.UNUSABLE
    assert done.stderr.strip().endswith("pip install 'diloco-syncer[tls]'")
    assert len(done.stderr.splitlines()) == 1
