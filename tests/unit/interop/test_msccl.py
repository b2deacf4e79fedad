"""MSCCL XML: what schedules export, that it reads back to the same text, and what is refused."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from foreshard.comm.schedules.registry import ALGORITHMS, schedule_of
from foreshard.comm.schedules.ring import ring
from foreshard.comm.schedules.schedule import Chunk, ScheduleBuilder
from foreshard.comm.schedules.verify import verify
from foreshard.comm.synthesis.budget import SynthesisBudget
from foreshard.comm.synthesis.synthesize import synthesize
from foreshard.comm.topology.graph import Edge, Topology, Vertex
from foreshard.errors import SpecError
from foreshard.interop.collective_schedules.msccl import COLLECTIVE_NAMES, msccl_xml
from foreshard.interop.collective_schedules.msccl_reader import schedule_of_msccl

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
        assert verify(again) == ()
        assert again.num_sends == schedule.num_sends
        assert msccl_xml(again) == text, (num_ranks, options)


def test_a_ring_is_fused():
    """As the ring of msccl-tools: a send, reductions passed on and not kept, the sum, copies passed on."""
    text = msccl_xml(ring("all-reduce", 4))
    head = (
        'name="ring" proto="Simple" nchannels="1" nchunksperloop="4" ngpus="4" coll="allreduce" inplace="1"'
    )
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
        ('type="rrcs"', 'type="rex"', "unknown step"),
        ('type="rrcs"', 'type="re"', "what has arrived in scratch once"),
        ('type="rrcs"', 'type="rcs"', "ends with chunk"),
        ('type="r"', 'type="s"', "sends and"),
        ('srcbuf="i"', 'srcbuf="z"', "unknown buffer"),
        ('dstoff="2"', 'dstoff="7"', "a step at i7"),
        ('cnt="1"', 'cnt="2"', "a step at i3"),
        ('cnt="1"', 'cnt="99999999"', "step.cnt"),
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
    with pytest.raises(SpecError) as error:
        schedule_of_msccl(changed, file="x.xml")
    assert words in str(error.value) and "x.xml" in str(error.value)


def test_a_circle_of_thread_blocks_is_refused():
    chunk = Chunk(weight=1.0, sources=(0,), targets=(0, 1, 2))
    build = ScheduleBuilder("broadcast", "x", 3, [chunk])
    first = build.send(0, 1, 0)
    build.send(1, 2, 0, channel=1, after=[first])
    text = msccl_xml(build.schedule())
    assert verify(schedule_of_msccl(text)) == ()
    assert 'depid="0" deps="0"' in text
    circle = text.replace('type="r"', 'type="r" ', 1).replace(
        'depid="-1" deps="-1" hasdep="1"', 'depid="1" deps="0" hasdep="1"'
    )
    with pytest.raises(SpecError, match="wait for each other"):
        schedule_of_msccl(circle)


def test_blocks_do_not_hold_back_what_each_other_waits_for():
    """With receives last, both blocks of rank 1 would send first what the other has yet to receive."""
    build = ScheduleBuilder(
        "all-reduce", "crossed", 2, [Chunk(weight=0.5, sources=(0, 1), targets=(0, 1)) for _ in range(2)]
    )
    first = build.send(0, 1, 0, reduce=True, channel=1)
    second = build.send(0, 1, 1, reduce=True, channel=0)
    build.send(1, 0, 1, channel=1, after=[second])
    build.send(1, 0, 0, channel=0, after=[first])
    again = schedule_of_msccl(msccl_xml(build.schedule()))
    assert again.num_sends == 4 and verify(again) == ()


@pytest.mark.parametrize("collective", ["all-gather", "reduce-scatter", "all-reduce"])
def test_what_is_synthesized_over_several_links_reads_back(collective):
    """Its channels name links, and chunks change from one to another on their way."""
    links = [
        Edge(source=one, target=other, bytes_per_s=rate)
        for one in range(4)
        for other in ((one + 1) % 4, (one - 1) % 4)
        for rate in (1e9, 3e9, 7e9)
    ]
    ring_of_links = Topology(
        vertices=tuple(Vertex(name=f"gpu{i}", kind="device") for i in range(4)), links=tuple(links)
    )
    looks = itertools.count()
    budget = SynthesisBudget(0.5, lambda: next(looks) * 1e-3, lambda: 0.0)
    found = synthesize(collective, 1e9, ring_of_links, budget=budget).schedule
    assert len(set(found.channel.tolist())) > 1
    assert verify(schedule_of_msccl(msccl_xml(found))) == ()


def test_steps_that_wait_twice_get_a_step_that_does_nothing():
    build = ScheduleBuilder("all-reduce", "x", 3, [Chunk(weight=1.0, sources=(0, 1, 2), targets=(0, 1, 2))])
    into = [build.send(1, 0, 0, reduce=True), build.send(2, 0, 0, reduce=True)]
    build.send(0, 1, 0, after=into)
    build.send(0, 2, 0, after=into)
    text = msccl_xml(build.schedule())
    assert text.count('type="nop"') == 2
    again = schedule_of_msccl(text)
    assert verify(again) == ()
    assert msccl_xml(again) == text


def step(
    n: int, kind: str, source: str, target: str, *, wait: tuple[int, int] = (-1, -1), cnt: int = 1
) -> str:
    """Return a step between locations such as 'i0'."""
    return (
        f'<step s="{n}" type="{kind}" srcbuf="{source[0]}" srcoff="{source[1:]}" dstbuf="{target[0]}" '
        f'dstoff="{target[1:]}" cnt="{cnt}" depid="{wait[0]}" deps="{wait[1]}" hasdep="1"/>'
    )


def file_of(coll: str, inplace: int, chunks: int, *gpus: list[tuple[str, list[str]]]) -> str:
    """Return XML of GPUs, each of thread blocks, each of attributes and steps."""
    lines = [
        f'<algo name="x" proto="LL" nchannels="1" nchunksperloop="{chunks}" ngpus="{len(gpus)}" '
        f'coll="{coll}" inplace="{inplace}">'
    ]
    for gpu, blocks in enumerate(gpus):
        lines.append(f'<gpu id="{gpu}" i_chunks="{chunks}" o_chunks="0" s_chunks="1">')
        for n, (ends, steps) in enumerate(blocks):
            lines += [f'<tb id="{n}" {ends} chan="0">', *steps, "</tb>"]
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def test_what_is_added_from_scratch_is_added_as_it_arrives():
    """Both exchange halves into scratch, add them there, and exchange the sums."""
    gpus = [
        [
            ('send="-1" recv="-1"', [step(0, "re", "s0", f"i{own}", wait=(1, 1))]),
            (
                f'send="{other}" recv="{other}"',
                [
                    step(0, "s", f"i{other}", "s0"),
                    step(1, "r", f"i{own}", "s0"),
                    step(2, "s", f"i{own}", f"i{own}", wait=(0, 0)),
                    step(3, "r", f"i{other}", f"i{other}"),
                ],
            ),
        ]
        for own, other in ((0, 1), (1, 0))
    ]
    schedule = schedule_of_msccl(file_of("allreduce", 1, 2, *gpus))
    assert schedule.num_sends == 4 and schedule.is_reduced.sum() == 2
    assert msccl_xml(schedule_of_msccl(msccl_xml(schedule))) == msccl_xml(schedule)


def test_a_step_of_several_chunks_is_several_sends():
    gpus = [
        [
            (
                f'send="{1 - gpu}" recv="{1 - gpu}"',
                [
                    step(0, "s", f"o{2 * gpu}", f"o{2 * gpu}", cnt=2),
                    step(1, "r", f"o{2 - 2 * gpu}", f"o{2 - 2 * gpu}", cnt=2),
                ],
            )
        ]
        for gpu in (0, 1)
    ]
    schedule = schedule_of_msccl(file_of("allgather", 1, 4, *gpus))
    assert schedule.chunk.tolist() == [0, 1, 2, 3]


def test_a_chunk_copied_to_scratch_is_known_there():
    gpus = [
        [
            (
                f'send="{1 - gpu}" recv="{1 - gpu}"',
                [
                    step(0, "cpy", f"i{1 - gpu}", "s0"),
                    step(1, "s", "s0", f"o{gpu}"),
                    step(2, "r", "s0", f"o{1 - gpu}"),
                ],
            )
        ]
        for gpu in (0, 1)
    ]
    schedule = schedule_of_msccl(file_of("alltoall", 0, 2, *gpus))
    assert schedule.chunk.tolist() == [1, 2]
