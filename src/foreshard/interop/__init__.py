"""Files and logs of other tools, in both directions; nothing else of the project knows their formats.

``exporters/`` writes a plan for another tool, ``importers/`` reads another tool's configuration as a plan,
``collective_schedules/`` reads and writes schedules of collectives, ``peers/`` runs other predictors from
their checkouts, and ``nccl_tests.py`` reads what nccl-tests print. ``megatron_flags.py`` has words
that are both written and read. Read ``exporters/__init__.py`` first.
"""
