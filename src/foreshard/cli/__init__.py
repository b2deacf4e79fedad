"""The command line: one file per verb; each parses, calls `api` and prints."""


def main() -> None:
    """Run the command line and leave with its exit code."""
    import sys

    from foreshard.cli.program import run

    sys.exit(run(sys.argv[1:]))
