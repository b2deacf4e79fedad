"""``python -m foreshard`` is the ``foreshard`` command."""

from foreshard.cli import main

if __name__ == "__main__":
    main()
