"""What holds for every test."""

import os

# Before anything imports torch: its OpenMP threads must not spin while the other core is busy.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
