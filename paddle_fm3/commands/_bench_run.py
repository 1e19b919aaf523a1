# SPDX-License-Identifier: Apache-2.0
"""The process that `bench` measures in: one JSON line of columns on stdout, then one a record."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def prepared_environment(threads: int) -> dict[str, str]:
    """Same threads for every impl, and NumPy's own choice of kernel (an override would lower the bar)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "FLAGS_paddle_num_threads"):
        environment[name] = str(threads)
    return environment


def main(wanted: dict[str, Any]) -> int:
    sys.stdout, results = sys.stderr, sys.stdout  # what libraries print stays out of the records
    try:
        device = importlib.import_module(f"paddle_fm3.testing.bench_{wanted['device']}")
    except ImportError as error:
        print(f"bench: --device {wanted['device']} cannot be measured here: {error}", file=sys.stderr)
        return 2
    from paddle_fm3.testing import bench

    for name, known in (("case", device.CASES), ("impl", device.IMPLS)):
        for value in wanted[name]:
            if value not in known:
                print(
                    f"bench: --{name} {value!r} is unknown on {wanted['device']}; known: {', '.join(known)}",
                    file=sys.stderr,
                )
                return 2
    kind = "memory" if wanted["memory"] else "attention"
    threads = wanted["threads"] or len(os.sched_getaffinity(0))
    options = bench.BenchOptions(*(tuple(wanted[x]) for x in ("case", "impl", "dtype")), wanted["repeats"], threads)
    print(json.dumps({"columns": device.COLUMNS[kind]}), file=results, flush=True)
    for record in device.run(kind, options):
        print(json.dumps(record), file=results, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
