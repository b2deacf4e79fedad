"""Strangers at the rendezvous: refused, and no trouble to those who belong there."""

import contextlib
import hmac
import os
import socket
import struct
import time

import pytest

from foreshard.errors import SpecError
from foreshard.runtime.membership.secret import awaited_secret, checked_secret, make_secret
from foreshard.runtime.membership.store import MAX_UNAUTHENTICATED, Client, StoreServer
from foreshard.runtime.membership.wire import MAX_MESSAGE_BYTES, Refused

SECRET = b"known to the ranks of the run"


@pytest.fixture
def server():
    made = StoreServer("127.0.0.1", 0, SECRET)
    yield made
    made.close()


def works(server):
    began = time.monotonic()
    Client((server.address, server.port), SECRET).ask({"ask": "set", "key": "k", "value": ""})
    return time.monotonic() - began < 2


def test_who_does_not_know_the_secret_is_refused_and_leaves_nothing(server):
    with pytest.raises(Refused, match="refused"):
        Client((server.address, server.port), b"a guess").ask({"ask": "set", "key": "mine", "value": ""})
    assert Client((server.address, server.port), SECRET).ask({"ask": "count"}) == {"value": 0}


def test_a_proof_is_of_no_use_twice(server):
    def hello(link, proof=None):
        nonce = link.recv(32)
        proof = proof or b"\1" * 32 + hmac.new(SECRET, b"rank" + nonce + b"\1" * 32, "sha256").digest()
        link.sendall(proof)
        return proof, link.recv(32)

    with socket.create_connection((server.address, server.port)) as one:
        proof, answer = hello(one)
        assert not answer.startswith(b"refused")
    with socket.create_connection((server.address, server.port)) as two:
        assert hello(two, proof)[1].startswith(b"refused")


def test_a_server_without_the_secret_is_not_believed():
    impostor = StoreServer("127.0.0.1", 0, b"another secret")
    with pytest.raises(Refused):
        Client((impostor.address, impostor.port), SECRET).ask({"ask": "count"})
    impostor.close()


def test_strangers_who_say_nothing_do_not_keep_ranks_out(server):
    silent = [
        socket.create_connection((server.address, server.port)) for _ in range(MAX_UNAUTHENTICATED // 2)
    ]
    assert works(server)
    for link in silent:
        link.close()


def test_more_silent_strangers_than_there_are_places_delay_a_rank_but_do_not_stop_it(server, monkeypatch):
    monkeypatch.setattr("foreshard.runtime.membership.store.HANDSHAKE_S", 0.5)
    silent = [
        socket.create_connection((server.address, server.port)) for _ in range(MAX_UNAUTHENTICATED + 20)
    ]
    client = Client((server.address, server.port), SECRET, patience_s=10)
    began = time.monotonic()
    assert client.ask({"ask": "count"}) == {"value": 0}
    assert time.monotonic() - began < 8
    for link in silent:
        link.close()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(5000), b"\x80\x04\x95pickle" * 20]
)
def test_garbage_ends_only_the_connection_it_came_by(server, garbage):
    with socket.create_connection((server.address, server.port)) as link, contextlib.suppress(OSError):
        link.sendall(garbage)
        link.settimeout(2)
        while link.recv(4096):
            pass
    assert works(server)


def test_a_gigabyte_is_not_read(server):
    link = socket.create_connection((server.address, server.port))
    sent, piece, began = 0, b"\0" * 2**20, time.monotonic()
    with contextlib.suppress(OSError):
        link.settimeout(2)
        while sent < 2**30 and time.monotonic() - began < 5:
            sent += link.send(piece)
    link.close()
    assert sent < 2**27
    assert works(server)


def test_a_rank_that_announces_too_long_a_message_is_hung_up_on(server):
    client = Client((server.address, server.port), SECRET)
    client.ask({"ask": "count"})
    link = client._link()
    link.sendall(struct.pack("!I", MAX_MESSAGE_BYTES + 1))
    link.settimeout(2)
    assert link.recv(10) == b""
    assert works(server)


def test_the_server_listens_on_the_given_address_only(server):
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", server.port), timeout=1):
        pass


def test_a_secret_is_made_for_its_owner_only(tmp_path):
    path = make_secret(tmp_path / "run" / "secret")
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes()) == 64
    assert make_secret(path).read_bytes() == path.read_bytes()


def test_a_secret_that_others_may_read_is_not_taken(tmp_path):
    path = tmp_path / "secret"
    path.write_text("x" * 32)
    path.chmod(0o644)
    with pytest.raises(SpecError, match="others may read"):
        checked_secret(path)
    path.chmod(0o600)
    assert checked_secret(path) == path
    path.write_text("short")
    with pytest.raises(SpecError, match="short"):
        checked_secret(path)


def test_a_secret_left_in_the_folder_of_the_run_is_not_taken_if_others_may_read_it(tmp_path):
    (tmp_path / "secret").write_text("x" * 64)
    (tmp_path / "secret").chmod(0o640)
    for taken in (make_secret, awaited_secret):
        with pytest.raises(SpecError, match="others may read"):
            taken(tmp_path / "secret")


def test_a_new_secret_is_written_to_no_file_that_was_there(tmp_path):
    seen = tmp_path / "seen"
    seen.touch(0o644)
    (tmp_path / "secret.new").symlink_to(seen)
    made = make_secret(tmp_path / "secret")
    assert not seen.read_bytes() and not made.is_symlink() and made.stat().st_mode & 0o777 == 0o600


def test_a_short_secret_in_the_environment_is_refused(tmp_path, monkeypatch):
    for given in ("", "short"):
        monkeypatch.setenv("FORESHARD_SECRET", given)
        with pytest.raises(SpecError, match="short"):
            make_secret(tmp_path / "secret")
