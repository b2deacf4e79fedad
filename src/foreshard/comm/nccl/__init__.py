"""NCCL's own cost model: which algorithm and protocol NCCL picks, and how close the choice is.

Decides, for a collective, its bytes and a communicator, the time that NCCL estimates for every algorithm
(ring, tree, CollNet, NVLS, NVLSTree, PAT) with every protocol (LL, LL128, Simple), the pick, the runner-up,
the margin between both, and why the others cannot run. The rules are those of one release; its constants are
data in ``catalog/data/nccl_tuning.toml``. The estimates rank candidates: times to plan with are those of
``comm/collectives.py``. RCCL's choice on nodes of MI300X is in ``rccl.py``.
Read ``choice.py`` first, then ``estimates.py``, ``communicator.py`` (what NCCL knows
about a cluster) and ``channels.py`` (its search for channels).
"""
