"""Write the plan that splits samples evenly: N replicas on N ranks, as DDP does."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def even(plan: dict, ranks: int) -> dict:
    """Return a plan of `ranks` equal replicas with the batch, precision and optimizer of another."""
    layers = max(hi for stage in plan["groups"][0]["stages"] for _, hi in stage["layers"])
    batch = plan["global_batch"]
    shares = [batch // ranks + (rank < batch % ranks) for rank in range(ranks)]
    size = max(group["micro_batch"] for group in plan["groups"])
    groups = [
        {
            "share": share,
            "micro_batch": min(size, share),
            "zero": 0,
            "stages": [{"ranks": [rank], "layers": [[0, layers]]}],
        }
        for rank, share in enumerate(shares)
    ]
    kept = {name: plan[name] for name in ("global_batch", "seq_len", "precision", "optimizer", "framework")}
    return {"schema_version": 1, **kept, "groups": groups}


if __name__ == "__main__":
    print(json.dumps(even(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])), indent=1))
