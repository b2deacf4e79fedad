"""A test bed in which ranks really train: a mixed cluster emulated on one machine, changing at stated steps.

`lab.py` is the lab as its file states it; `emulation.py` and `lab_rank.py` are how a run is started on
it; `network.py` enforces speeds and links on the wall clock,
`runtime.device_memory` memory on every clock; `simulated_run.py` plays policies in a lab
without training. The runtime knows nothing of labs: they pass in the hardware of each rank
(``runtime/hardware.py``). Read `lab.py` first.
"""
