"""Constants of `trainee.py` that `bench.goodput` reads without an import of torch."""

from __future__ import annotations

import struct

RECORD = struct.Struct("<dqii")
STARTED = "started"
"""File in the shared folder from which on the first interval counts."""
FSDP2 = "fsdp2"
WIDTHS = {"8MB": (800, 1), "800MB": (5700, 2), FSDP2: (2300, 1)}
"""Width and depth by the size of parameters and Adam's state, 12 bytes for each parameter; of the
model that is sharded with FSDP2, 65 MB over all ranks."""
