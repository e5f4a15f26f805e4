"""Experiments: whether a run trains as well as it should, and what its settings are worth.

    python -m experiments.NAME [--json FILE] [--png FILE] [--quick]

Each is one command with fixed seeds and takes minutes of one core. The figures are in
docs/experiments.md. Linear algebra gets one thread, so that a figure depends on no machine's load.
"""

import os

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")             # read when NumPy is first imported
