"""A test bed for policies in which nothing trains: all play the same changing cluster, slot by slot.

A scenario goes in, an `Evaluation` comes out: mean step time, costs and changes of every policy on the same
paths, beside a lower bound that knows the future. `dynamics` draws paths, `slot_loop` plays them,
`reference_policies` are what the controller is compared with, `policy_adapter` plays any policy of events,
`clairvoyant_bound` and `hindsight` know the path. Read `evaluation` first. A policy that can also run on
ranks belongs in `control.policies`; `reference_policies` has rules for scenarios alone. A new scenario is a
TOML file, as those of ``examples/scenarios`` and ``bench/scenarios``; its keys are in ``spec/scenario.py``,
and a new way in which a cluster changes is in `dynamics`.
"""
