"""Bad input of every verb of `foreshard comm`: code 2, with value, rule and fix, whatever the file holds."""

from __future__ import annotations

import json
import random
import re

import pytest

from foreshard.cli.comm.inputs import least_sends
from foreshard.comm.schedules.registry import ALGORITHMS, schedule_of
from foreshard.errors import SpecError

NCCL = """<system version="1"><cpu numaid="0" arch="x86_64" vendor="GenuineIntel">
<pci busid="0:1" class="0x060400" link_speed="16 GT/s" link_width="16">
<pci busid="0:2" class="0x030200" link_speed="16 GT/s" link_width="16">
<gpu dev="0" sm="80" rank="0"><nvlink target="0:3" count="4" tclass="0x030200"/></gpu></pci>
<pci busid="0:3" class="0x030200" link_speed="16 GT/s" link_width="16">
<gpu dev="1" sm="80" rank="1"><nvlink target="0:2" count="4" tclass="0x030200"/></gpu></pci>
</pci></cpu></system>"""
ASTRA = (
    "topology: [ Ring, Switch ]\nnpus_count: [ 4, 2 ]\nbandwidth: [ 50.0, 25.0 ]\nlatency: [ 500.0, 900.0 ]\n"
)
ENDS = {"source": "a", "target": "b", "bandwidth": "50 GB/s", "both_ways": True}
GRAPH = {"vertices": [{"name": "a", "kind": "device"}, {"name": "b", "kind": "device"}], "links": [ENDS]}
LOG = """#       size         count      type   redop    root     time   algbw   busbw #wrong
     1048576        262144     float     sum      -1    20.50   51.15   51.15      0
"""
BOMB = "<!DOCTYPE a [" + "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10 if i else "lol"}">' for i in range(9))
BOMB += ']><system version="1">&e8;</system>'
FILES = {
    "topo.xml": NCCL,
    "bomb.xml": BOMB,
    "cut.xml": NCCL[:-20],
    "astra.yml": ASTRA,
    "graph.json": json.dumps(GRAPH),
    "apart.json": json.dumps(GRAPH | {"links": [ENDS | {"both_ways": False}]}),
    "still.json": json.dumps(GRAPH | {"links": [ENDS | {"bandwidth": "0 GB/s"}]}),
    "units.json": json.dumps(GRAPH | {"links": [ENDS | {"bandwidth": "50 GiB"}]}),
    "sweep.log": LOG,
}
TWO, SIM = "1x2xh100-sxm", ("simulate", "all-reduce", "1MiB")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("input")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def refused(shell, *words):
    """The error of a call that must end with 2, and say what, by which rule or with which way out."""
    answer = shell("comm", *words, "--json")
    assert answer.code == 2, (words, answer.err)
    error = json.loads(re.search(r'\{\s*"schema_version": 1,\s*"error".*', answer.out, re.S)[0])["error"]
    assert error["what"] and (error["rule"] or error["fix"]), words
    assert error["key"] or error["file"], words
    return error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*SIM, "apart.json"), "no path leads"),
        ((*SIM, "still.json"), "bandwidth"),
        ((*SIM, "units.json"), "50 GiB"),
        ((*SIM, "bomb.xml"), "document type"),
        ((*SIM, "cut.xml"), "not"),
        ((*SIM, "graph.json", "--ranks", "3"), "3 ranks on 2 devices"),
        (("simulate", "broadcast", "1MiB", TWO, "--ranks", "1000000000"), "ranks on 2 devices"),
        ((*SIM, TWO, "--parts", "1000000000"), "sends or more"),
        ((*SIM, TWO, "--channels", "1000000000"), "sends or more"),
        ((*SIM, TWO, "--algorithm", "double-tree", "--parts", "9000000"), "sends or more"),
        ((*SIM, TWO, "--algorithm", "topo.xml"), "its root is"),
        ((*SIM, TWO, "--algorithm", "graph.json"), "unknown key"),
        ((*SIM, "sweep.log"), "TOML"),
        (("synthesize", "all-gather", "1MiB", "apart.json"), "no path leads"),
        (("synthesize", "all-gather", "1MiB", "bomb.xml"), "document type"),
        (("export", "bomb.xml", "--to", "msccl"), "document type"),
        (("export", "sweep.log", "--to", "svg"), "TOML"),
        (("import", "astra.yml"), "nccl-tests"),
        (
            ("import", "sweep.log", "graph.json", "--collective", "all-reduce", "--fit", "f.toml"),
            "TOML",
        ),
        (("predict", "all-reduce", "1 parsec", TWO), "1 parsec"),
        (("predict", "all-reduce", "1MB/s", TWO), "1MB/s"),
        (("predict", "all-reduce", "1MiB", "1x2xh100-sxm@-1Gb/s"), "-1Gb/s"),
        (("predict", "all-reduce", "1MiB", TWO, "--costs", "graph.json"), "nccl-tests"),
        (("predict", "all-reduce", "1MiB", "1x1xh100-sxm"), "1 rank"),
        (("compress", "1MiB", TWO, "--method", "topk:2"), "topk:2"),
        (("compress", "0", TWO), "SIZE"),
        (("buckets", "gpt2", "graph.json"), "TOML"),
        (("jobs", "graph.json"), "unknown key"),
        (("measure", "all-reduce", "1KiB", "--local", "2", "--algorithm", "bomb.xml"), "document type"),
    ],
)
def test_bad_input_is_refused_with_its_reason(shell, files, words, said):
    error = refused(shell, *(files / word if word in FILES else word for word in words))
    assert said in " ".join(str(error[part]) for part in ("what", "key", "value", "rule"))


WRONG = ("0", "-1", "1e999", "nan", "null", '"x"', "[]", "{}", '"5 parsecs"', "<", "}", "\x00", "[[1]]")


def mutated(text: str, rng: random.Random) -> str:
    """The text cut off, with a number, word or line exchanged or doubled."""
    lines = text.splitlines(keepends=True)
    spots = list(re.finditer(r'-?\d+(\.\d+)?|"[^"]*"', text))
    way = rng.randrange(4)
    if way == 0 or not spots:
        return text[: rng.randrange(len(text))]
    if way == 1:
        return "".join(rng.choices(lines, k=len(lines)))
    spot = rng.choice(spots)
    return text[: spot.start()] + rng.choice(WRONG) + text[spot.end() if way == 2 else spot.start() :]


@pytest.mark.parametrize("name", ["topo.xml", "astra.yml", "graph.json", "sweep.log"])
def test_no_file_is_a_fault_of_ours(shell, tmp_path, name):
    """Catches a reader that trusts what it reads; `FORESHARD_DEBUG=1` shows the traceback."""
    rng = random.Random(name)
    path, fine = tmp_path / name, 0
    for _ in range(25):
        path.write_text(mutated(FILES[name], rng))
        words = [*SIM, path] if not name.endswith(".log") else ["import", path, "--collective", "all-reduce"]
        answer = shell("comm", *words)
        assert answer.code in (0, 2) and "internal fault" not in answer.err, path.read_text()
        fine += answer.code == 0
    assert fine < 25


def test_the_least_sends_of_a_piece_are_no_more_than_there_are():
    for name, algorithm in ALGORITHMS.items():
        for collective in algorithm.collectives:
            for ranks in (2, 4, 8, 16):
                try:
                    schedule = schedule_of(collective, name, ranks, per_node=min(ranks, 8))
                except SpecError:
                    continue
                assert least_sends(collective, name, ranks) <= schedule.num_sends, (collective, name, ranks)
