"""`foreshard comm VERB`: collectives and gradient buckets, one file per verb.

In go words and options; out comes an answer as of every verb. A verb of this group is a file of its name here
with a ``command`` made by ``verb_command``, and a line in ``verbs.py``. Read ``verbs.py`` first, then
``predict.py``.
"""

from foreshard.cli.comm.verbs import command

__all__ = ["command"]
