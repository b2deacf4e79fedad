"""The rendezvous: keys, waits, one answer per question, a server that comes back, and torch on top of it."""

import itertools
import random
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from foreshard.errors import SpecError
from foreshard.runtime.membership.rank_store import RankStore
from foreshard.runtime.membership.store import Client, StoreServer

SECRET = b"a secret of this test"


@pytest.fixture
def server():
    made = StoreServer("127.0.0.1", 0, SECRET, lambda message: {"heard": message["ask"]})
    yield made
    made.close()


def store_at(server, **more):
    return RankStore(Client((server.address, server.port), SECRET, patience_s=2.0), **more)


def test_keys_are_set_read_added_and_deleted(server):
    store = store_at(server)
    store.set("a", "one")
    store.set("b", b"\x00\xff")
    assert (store.get("a"), store.get("b")) == (b"one", b"\x00\xff")
    assert [store.add("n", 2), store.add("n", -5)] == [2, -3]
    assert store.check(["a", "n"]) and not store.check(["a", "x"])
    assert store.num_keys() == 3
    assert store.delete_key("a") and not store.delete_key("a")


def test_a_wait_ends_when_the_key_comes_and_when_time_is_up(server):
    store = store_at(server, timeout_s=5)
    threading.Timer(0.1, lambda: store_at(server).set("late", "x")).start()
    assert store.get("late") == b"x"
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="waited"):
        store.wait(["never"], timedelta(seconds=0.2))
    assert time.monotonic() - began < 2


def test_a_wait_is_given_up_when_the_peer_has_left(server):
    left = threading.Event()
    store = store_at(server, timeout_s=30, abandoned=left.is_set)
    threading.Timer(0.1, left.set).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="a peer left"):
        store.get("never")
    assert time.monotonic() - began < 2


def test_process_groups_find_each_other_from_their_own_threads(server):
    found = {}

    def body(rank):
        store = store_at(server, timeout_s=10)  # torch does not keep a store of Python's alive
        group = dist.ProcessGroupGloo(dist.PrefixStore("g0/world", store), rank, 3, timedelta(seconds=10))
        value = torch.tensor([float(rank + 1)])
        group.allreduce([value]).wait()
        found[rank] = float(value[0])

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {0: 6.0, 1: 6.0, 2: 6.0}


def test_a_question_whose_answer_was_lost_is_answered_once(server):
    client = Client((server.address, server.port), SECRET)
    told = {"ask": "add", "key": "n", "value": 1, "once": client.once()}
    assert [client.ask(told)["value"], client.ask(told)["value"]] == [1, 1]
    assert client.ask({**told, "once": client.once()})["value"] == 2


def test_a_client_goes_on_with_a_server_that_came_back(server):
    client = Client((server.address, server.port), SECRET, patience_s=10)
    assert client.ask({"ask": "hello"}) == {"heard": "hello"}
    server.close()
    again = []
    back = threading.Timer(0.2, lambda: again.append(StoreServer("127.0.0.1", server.port, SECRET)))
    back.start()
    assert client.ask({"ask": "count"}) == {"value": 0}
    back.join()
    again[0].close()


def test_what_a_client_has_set_is_there_again_when_the_server_comes_back(server):
    """Keys are lost with the server at a random moment: between a wait and its get, or long after."""
    draw, servers, over = random.Random(0), [server], threading.Event()
    clients = [Client(("127.0.0.1", server.port), SECRET, patience_s=20) for _ in range(3)]
    stores = [RankStore(client, timeout_s=20) for client in clients]

    def beat(client):  # as the heartbeat of a rank, whose main thread may ask for nothing
        while not over.wait(0.02):
            client.ask({"ask": "count"})

    def restart():
        while not over.wait(draw.uniform(0.05, 0.4)):
            servers.pop().close()
            servers.append(StoreServer("127.0.0.1", server.port, SECRET))

    threads = [threading.Thread(target=beat, args=(client,)) for client in clients]
    threads.append(threading.Thread(target=restart))
    for thread in threads:
        thread.start()
    try:
        until = time.monotonic() + 4
        for turn in itertools.takewhile(lambda _: time.monotonic() < until, itertools.count()):
            for rank, store in enumerate(stores):
                store.set(f"g{turn}/{rank}", f"{turn} of {rank}")
            for rank in range(3):
                found = [store.get(f"g{turn}/{rank}") for store in stores]
                assert found == [f"{turn} of {rank}".encode()] * 3
            for client in clients:
                client.forget(f"g{turn}/")
    finally:
        over.set()
        for thread in threads:
            thread.join()
        servers.pop().close()


def test_nobody_answering_is_an_error_after_the_patience():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="does not answer"):
        Client(("127.0.0.1", port), SECRET, patience_s=0.2).ask({"ask": "count"})
    assert time.monotonic() - began < 5


def test_a_question_that_makes_no_sense_is_an_error_and_not_the_end(server):
    client = Client((server.address, server.port), SECRET)
    for question in ({"ask": "set", "key": "a"}, {"ask": "add", "key": "n", "value": float("inf")}):
        with pytest.raises(RuntimeError, match="malformed question"):
            client.ask(question)
    assert client.ask({"ask": "count"}) == {"value": 0}


def test_an_empty_secret_is_refused():
    with pytest.raises(SpecError, match="empty"):
        StoreServer("127.0.0.1", 0, b"")
