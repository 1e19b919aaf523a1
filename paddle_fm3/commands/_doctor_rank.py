# SPDX-License-Identifier: Apache-2.0
"""One rank of `doctor`, for launchers that start a file: ``_doctor_rank.py [doctor's options]``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The file's own folder comes first on the path; the package is what must be importable.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from paddle_fm3.__main__ import main

    sys.exit(main(["doctor", *sys.argv[1:]]))
