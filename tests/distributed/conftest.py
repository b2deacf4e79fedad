"""Tests of this folder share jobs, plans and ranks as threads."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
