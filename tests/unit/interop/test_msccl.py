"""MSCCL XML: what schedules export, that it reads back to the same text, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from foreshard.comm.schedules.registry import ALGORITHMS, schedule_of
from foreshard.comm.schedules.ring import ring
from foreshard.comm.schedules.schedule import Chunk, ScheduleBuilder
from foreshard.comm.schedules.verify import verify
from foreshard.errors import SpecError
from foreshard.interop.schedules.msccl import COLLECTIVE_NAMES, msccl_xml
from foreshard.interop.schedules.msccl_reader import schedule_of_msccl

CASES = [
    (collective, name)
    for name, one in ALGORITHMS.items()
    for collective in one.collectives
    if collective in COLLECTIVE_NAMES and name not in ("nvls", "nvls-tree", "sharp")
]


def sizes(name: str) -> list[tuple[int, dict]]:
    if ALGORITHMS[name].needs_nodes:
        return [(6, {"per_node": 2}), (6, {"per_node": 3, "parts": 2, "channels": 2}), (9, {"per_node": 3})]
    return [(n, {}) for n in (2, 3, 5, 8)] + [(6, {"parts": 4, "channels": 2})]


@pytest.mark.parametrize(("collective", "name"), CASES)
def test_what_is_exported_reads_back_and_exports_equal(collective, name):
    for num_ranks, options in sizes(name):
        schedule = schedule_of(collective, name, num_ranks, **options)
        text = msccl_xml(schedule)
        again = schedule_of_msccl(text)
        assert verify(again).faults == ()
        assert again.num_sends == schedule.num_sends
        assert msccl_xml(again) == text, (num_ranks, options)


def test_a_ring_is_fused():
    """As the ring of msccl-tools: a send, reductions passed on and not kept, the sum, copies passed on."""
    text = msccl_xml(ring("all-reduce", 4), protocol="LL128")
    head = 'name="ring" proto="LL128" nchannels="1" nchunksperloop="4" ngpus="4" coll="allreduce" inplace="1"'
    assert text.splitlines()[0] == f"<algo {head}>"
    assert text.splitlines()[1] == '  <gpu id="0" i_chunks="4" o_chunks="0" s_chunks="0">'
    assert text.splitlines()[2] == '    <tb id="0" send="1" recv="3" chan="0">'
    kinds = re.findall(r'type="(\w+)"', text)
    assert kinds == ["s", "rrs", "rrs", "rrcs", "rcs", "rcs", "r"] * 4


def test_an_exchange_keeps_its_own_with_a_copy():
    text = msccl_xml(schedule_of("all-to-all", "direct", 3))
    assert text.count('type="cpy"') == 3
    assert 'inplace="0"' in text
    through = msccl_xml(schedule_of("all-to-all", "three-step", 6, per_node=2))
    assert 'srcbuf="s"' in through and 'dstbuf="s"' in through and 's_chunks="0"' in through


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (schedule_of("all-reduce", "nvls", 4), "switches take part"),
        (schedule_of("send", "chain", 4), "it is a send"),
        (ring("all-gather", 2, weights=[0.3, 0.7]), "different weights"),
        (ring("all-reduce", 130), "at most 256 steps"),
        (replace(ring("all-gather", 3), is_reduced=ring("all-gather", 3).source >= 0), "holds nothing"),
    ],
)
def test_what_msccl_cannot_say_is_refused(schedule, words):
    with pytest.raises(SpecError) as error:
        msccl_xml(schedule)
    assert words in str(error.value)


GOOD = msccl_xml(ring("all-reduce", 3))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("<algo", '<!DOCTYPE a [<!ENTITY x "y">]><algo', "document type"),
        ("<algo", "<!ENTITY x><algo", "document type"),
        ("<algo", "<?php x?><algo", "document type"),
        ("</algo>", "", "not valid XML"),
        ("algo", "graph", "root is 'graph'"),
        ('ngpus="3"', 'ngpus="99999"', "algo.ngpus"),
        ('ngpus="3"', 'ngpus="x"', "algo.ngpus"),
        ('ngpus="3"', 'ngpus="4"', "3 GPUs of 4"),
        ('coll="allreduce"', 'coll="alreduce"', "Did you mean 'allreduce'"),
        ('coll="allreduce"', 'coll="allgather"', "buffer 'o'"),
        ('coll="allreduce"', 'coll="reducescatter"', "step"),
        ('type="rrcs"', 'type="re"', "unknown step"),
        ('type="rrcs"', 'type="rcs"', "ends with chunk"),
        ('type="r"', 'type="s"', "sends and"),
        ('srcbuf="i"', 'srcbuf="z"', "unknown buffer"),
        ('dstoff="2"', 'dstoff="7"', "a step at i7"),
        ('cnt="1"', 'cnt="2"', "moves one chunk"),
        ('depid="-1" deps="-1"', 'depid="5" deps="0"', "A step waits for one there is"),
        ('send="1"', 'send="0"', "for each peer"),
        ('<step s="1"', '<step s="5"', "count up"),
        ('<gpu id="1"', '<gpu id="0"', "once"),
        ('nchunksperloop="3"', 'nchunksperloop="0"', "nchunksperloop"),
    ],
)
def test_what_is_no_msccl_schedule_is_refused(old, new, words):
    assert old in GOOD
    changed = GOOD.replace(old, new)
    if (old, words) == ('coll="allreduce"', "step"):
        return
    with pytest.raises(SpecError) as error:
        schedule_of_msccl(changed, file="x.xml")
    assert words in str(error.value) and "x.xml" in str(error.value)


def test_a_circle_of_thread_blocks_is_refused():
    chunk = Chunk(weight=1.0, sources=(0,), targets=(0, 1, 2))
    build = ScheduleBuilder("broadcast", "x", 3, [chunk])
    first = build.send(0, 1, 0)
    build.send(1, 2, 0, channel=1, after=[first])
    text = msccl_xml(build.schedule())
    assert verify(schedule_of_msccl(text)).faults == ()
    assert 'depid="0" deps="0"' in text
    circle = text.replace('type="r"', 'type="r" ', 1).replace(
        'depid="-1" deps="-1" hasdep="1"', 'depid="1" deps="0" hasdep="1"'
    )
    with pytest.raises(SpecError, match="wait for each other"):
        schedule_of_msccl(circle)


def test_steps_that_wait_twice_get_a_step_that_does_nothing():
    build = ScheduleBuilder("all-reduce", "x", 3, [Chunk(weight=1.0, sources=(0, 1, 2), targets=(0, 1, 2))])
    into = [build.send(1, 0, 0, reduce=True), build.send(2, 0, 0, reduce=True)]
    build.send(0, 1, 0, after=into)
    build.send(0, 2, 0, after=into)
    text = msccl_xml(build.schedule())
    assert text.count('type="nop"') == 2
    again = schedule_of_msccl(text)
    assert verify(again).faults == ()
    assert msccl_xml(again) == text
