"""A schedule as Chakra execution traces, one for each rank: the input of ASTRA-sim.

A trace is a sequence of protobuf messages, each after its length. Only the few fields of sends and receives
are written, so the encoding stands here. Source: mlcommons/chakra schema/protobuf/et_def.proto for the
numbers of fields; names and types of attributes as its tools for ASTRA-sim write them.
"""

from __future__ import annotations

from foreshard.comm.schedules.schedule import Schedule
from foreshard.interop.collective_schedules.endpoints import Side, bytes_of, require_ranks_only, waits_at

VERSION = "0.0.4"
_SEND, _RECEIVE = 5, 6  # NodeType
_NODE = {"id": 1, "name": 2, "type": 3, "data_deps": 5, "attr": 10}
_ATTRIBUTE = {"name": 1, "int32": 7, "int64": 9, "bool": 27}
_VARINT, _BYTES = 0, 2  # wire types


def chakra_traces(schedule: Schedule, num_bytes: float) -> list[bytes]:
    """Return the trace of each rank; ASTRA-sim reads files ``NAME.RANK.et``.

    Parameters
    ----------
    schedule : Schedule
        Without switches.
    num_bytes : float
        Size of the collective.
    """
    require_ranks_only(schedule, "Chakra")
    traces = [[_delimited(_text(1, VERSION))] for _ in range(schedule.num_ranks)]
    for send in range(schedule.num_sends):
        ends = int(schedule.source[send]), int(schedule.target[send])
        for rank, is_out in zip(ends, (True, False), strict=True):
            traces[rank].append(_delimited(_node(schedule, (send, is_out), ends, num_bytes)))
    return [b"".join(trace) for trace in traces]


def _node(schedule: Schedule, side: Side, ends: tuple[int, int], num_bytes: float) -> bytes:
    """Return the message of one end of a send."""
    send, is_out = side
    waits = b"".join(_varint(_number(one)) for one in waits_at(schedule, side))
    numbers = {"comm_src": ends[0], "comm_dst": ends[1], "comm_tag": send}
    attributes = [
        _attribute("is_cpu_op", "bool", 0),
        _attribute("comm_size", "int64", bytes_of(schedule, send, num_bytes)),
        *(_attribute(name, "int32", value) for name, value in numbers.items()),
    ]
    return b"".join(
        [
            _integer(_NODE["id"], _number(side)),
            _text(_NODE["name"], f"{'send' if is_out else 'recv'} {send} chunk {schedule.chunk[send]}"),
            _integer(_NODE["type"], _SEND if is_out else _RECEIVE),
            _block(_NODE["data_deps"], waits) if waits else b"",
            *(_block(_NODE["attr"], one) for one in attributes),
        ]
    )


def _number(side: Side) -> int:
    """Return the identifier of an operation, above 0."""
    return 2 * side[0] + 1 + (not side[1])


def _attribute(name: str, kind: str, value: int) -> bytes:
    return _text(_ATTRIBUTE["name"], name) + _integer(_ATTRIBUTE[kind], value)


def _varint(value: int) -> bytes:
    """Return a whole number of at least 0, seven bits a byte, the lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _block(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _delimited(content)


def _text(field: int, content: str) -> bytes:
    return _block(field, content.encode("utf-8"))


def _delimited(content: bytes) -> bytes:
    return _varint(len(content)) + content
