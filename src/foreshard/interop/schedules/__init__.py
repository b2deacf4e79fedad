"""Schedules of collectives, and what chooses among them, as files of other tools and back.

Decides how a `Schedule` is said as MSCCL XML, GOAL text, Chakra traces, a Perfetto trace or foreshard's own
JSON, and how choices of algorithms are said to NCCL's tuner. What comes from a file is checked before it is
believed. A new format is one file. Read ``schedule_file.py`` first, then ``msccl.py``.
"""
