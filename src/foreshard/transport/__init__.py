"""Collectives as ranks really execute them: schedules over send and receive.

Decides when a rank sends and receives what a `Schedule` says. In go tensors and process groups, out come
sums. The runtime and the measurements of `profile` use it. Read ``schedule_execution.py`` first, then
``all_reduce.py`` and ``stage_message.py``.
"""
