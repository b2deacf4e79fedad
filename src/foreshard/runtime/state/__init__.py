"""What a rank holds of the model, and what moves when the plan changes.

Decides, from a plan, which rank holds, sums and updates which parameter, or which slice or shard of it, and
which tensors a rank sends to which when one plan replaces another. In go plans and the job's layers; out come
a rank's modules, gradient buckets, optimizer state, and moves. Read `layout` first (a plan as a rank sees
it), then `optimizer_sharding` (who keeps what) and `rank_state` (what is kept); `migration` moves it.
"""
