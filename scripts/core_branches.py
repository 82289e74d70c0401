"""Print how many branches of the core tests take, and fail below 95%.

    coverage json -q -o - | python scripts/core_branches.py

Leaves out what stands on the core: code for GPUs and TPUs, for other versions of JAX,
and for what only tests of models and training use isn't run by `make coverage`.
"""

import json
import sys

ON_THE_CORE = (
    "stacked_remat/diffrax.py",
    "stacked_remat/levanter.py",
    "stacked_remat/lora/",
    "stacked_remat/memory/",
    "stacked_remat/nnx/",
    "stacked_remat/ops/",
    "stacked_remat/streaming.py",
)
LEAST = 0.95


def main() -> int:
    taken = count = 0
    for path, file in json.load(sys.stdin)["files"].items():
        if not path.startswith(ON_THE_CORE):
            taken += file["summary"]["covered_branches"]
            count += file["summary"]["num_branches"]
    print(f"{taken} of {count} branches of the core are taken ({taken / count:.1%}).")
    return int(taken < LEAST * count)


if __name__ == "__main__":
    sys.exit(main())
