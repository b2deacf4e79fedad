"""Drawings of topologies: valid SVG, small, every vertex once, and boxes for what is many."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from foreshard.comm.topology import fabrics, regular
from foreshard.comm.topology.draft import Draft
from foreshard.comm.topology.drawing import drawing
from foreshard.comm.topology.machines import machine
from foreshard.comm.topology.tiers import summarised, tiers

sys.path.insert(0, str(Path(__file__).parent))
from published_topologies import PUBLISHED

SVG = "{http://www.w3.org/2000/svg}"
SMALL = {name: build() for name, (build, _) in PUBLISHED.items()} | {
    "full": regular.full_mesh(64, 1e9),
    "torus": regular.torus((4, 4, 4), 50e9),
    "pcie": fabrics.leaf_spine([machine("pcie-8")] * 8, nodes_per_leaf=2, num_spines=4),
    "fat-tree": fabrics.fat_tree([machine("hgx-h100")] * 8, radix=8),
    "mixed": fabrics.flat([machine(name) for name in ("dgx-1", "mi250", "hgx-b200", "mi300x")]),
}


@pytest.mark.parametrize("topology", SMALL.values(), ids=SMALL)
def test_a_drawing_has_every_vertex_and_is_small(topology):
    text = drawing(topology)
    assert len(text.encode()) <= 200_000
    root = ElementTree.fromstring(text)
    assert len(root.findall(f"{SVG}g")) == len(topology.vertices)
    assert text == drawing(topology)
    width, height = (float(part) for part in root.get("viewBox").split()[2:])
    for mark in root.iter(f"{SVG}circle"):
        assert 0 <= float(mark.get("cx")) <= width and 0 <= float(mark.get("cy")) <= height


@pytest.mark.parametrize(
    ("topology", "num_boxes"),
    [
        (fabrics.leaf_spine([machine("hgx-h100")] * 16, nodes_per_leaf=4, num_spines=4), 16 + 4 + 4),
        (fabrics.leaf_spine([machine("hgx-h100")] * 128, nodes_per_leaf=4, num_spines=8), 48 + 32 + 8),
        (fabrics.fat_tree([machine("hgx-h100")] * 128, radix=16), 48 + 3),
        (regular.torus((16, 16), 50e9), 1),
    ],
)
def test_many_devices_are_drawn_as_boxes(topology, num_boxes):
    text = drawing(topology)
    assert len(text.encode()) <= 200_000
    assert len(ElementTree.fromstring(text).findall(f"{SVG}g")) == num_boxes


def test_boxes_keep_the_bandwidth_between_them():
    topology = fabrics.leaf_spine(
        [machine("hgx-h100")] * 16, nodes_per_leaf=4, num_spines=4, oversubscription=2.0
    )
    small = summarised(topology)
    names = [vertex.name for vertex in small.vertices]
    assert "node 3: 8 devices" in names
    up = {names[link.source]: 0.0 for link in small.links}
    for link in small.links:
        if names[link.target].startswith("spine"):
            up[names[link.source]] += link.bytes_per_s
    assert up["leaf0"] == pytest.approx(4 * 400e9 / 2)


def test_tiers_rise_from_devices_to_the_core():
    topology = fabrics.fat_tree([machine("hgx-h100")] * 8, radix=8)
    of = {vertex.name: tier for vertex, tier in zip(topology.vertices, tiers(topology), strict=True)}
    assert [of[name] for name in ("node0.gpu0", "node0.nvswitch", "node0.nic0")] == [0, 1, 3]
    assert [of[name] for name in ("edge0.0", "agg0.0", "core0")] == [4, 5, 6]


def test_names_are_escaped():
    draft = Draft()
    one, other = draft.vertex("device", "<script>"), draft.vertex("device", "a&b")
    draft.send(one, other, 1e9)
    text = drawing(draft.topology('"<b>'))
    assert "<script>" not in text and "<b>" not in text
    ElementTree.fromstring(text)
    assert "stroke-dasharray" in text
