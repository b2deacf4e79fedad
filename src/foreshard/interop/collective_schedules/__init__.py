"""Schedules of collectives, and what chooses among them, as files of other tools and back.

Decides how a `Schedule` is said as MSCCL XML, GOAL text, Chakra traces or a Perfetto trace, and how choices
of algorithms are said to NCCL's tuner. What comes from a file is checked before it is believed. A new format
is one file; foreshard's own JSON is ``comm/schedules/schedule_file``. Read ``msccl.py`` first.
"""
