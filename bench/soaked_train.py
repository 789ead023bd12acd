"""The soak's training script: examples/digits, which trains on until it is told where to end.

`soaked_train.py FILE …`: FILE names the last step once it is there; it is read when workers start.
The rest are arguments of train.py, which is beside this file or in the working folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

# What train.py imports: this file is what a standby interpreter reads to know what to load.
import numpy  # noqa: F401
import torch.distributed
import torch.nn.parallel  # noqa: F401


def main() -> None:
    sys.path.append(str(Path.cwd()))
    import train  # type: ignore[import-not-found]

    last = Path(sys.argv.pop(1))
    if last.exists():
        sys.argv += ["--steps", last.read_text().strip()]
    train.main()


if __name__ == "__main__":
    main()
