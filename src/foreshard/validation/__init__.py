"""Published measurements predicted from their inputs alone, and the scores of these predictions.

Decides how a row of a published table is read as a model, cluster, plan and framework, what its blanks mean,
and how errors are counted. Tables of training steps, kernels and collectives go in; one outcome per row and a
summary by family come out: ``foreshard validate``. The family of a new table is described in
``data/families.toml``, what its cells state in ``data/cell_facts.toml``. Read ``validate.py`` first, then
``rows.py`` and ``scoring.py``.
"""
