"""The command line: one file per verb, which parses, calls `api` and prints.

In goes the argument list; out come an answer on standard output, everything else on standard error, and an
exit code. A new verb is one file and a line of ``verbs.py``; ``program.py`` runs them and turns every failure into its exit code,
``options/`` has what verbs share. Read ``program.py`` first, then ``predict.py``.
"""


def main() -> None:
    """Run the command line and leave with its exit code."""
    import sys

    from foreshard.cli.program import run

    sys.exit(run(sys.argv[1:]))
