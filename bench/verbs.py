"""The command line as benches start it, in their own environment."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def foreshard(*words: str) -> dict[str, Any]:
    """Run a verb and return its object."""
    command = [sys.executable, "-m", "foreshard", *words, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout))
