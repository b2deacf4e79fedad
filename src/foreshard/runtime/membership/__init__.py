"""Who trains: rendezvous, failure detection, and agreement after a loss or a join.

Decides which ranks form a *generation* and under which plan. In go heartbeats, requests to join, exit codes
and reports of lost links; out come generations, process groups and restarted ranks. A killed rank is noticed
in three places: its `agent` sees the exit code, the `supervisor` misses its heartbeat, and its peers get an
error from torch.distributed, which `runtime/worker.py` turns into a request for the next generation. The plan
after a loss is made in `plan_repair`; `operator_requests` has plans that a user asks for while the run goes
on. Read `supervisor` first, then `agent` (processes of a host), `member` (a rank's side) and `recovery` (on
what ranks agree).
"""
