"""Training script of the soak test: examples/digits without a fixed number of steps.

`stoppable_train.py FILE …`: FILE, read when workers start, has the last step once it exists. The
rest are arguments of train.py, which is beside this file or in the working folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The imports of train.py: a standby interpreter reads this file to find the modules to preload.
import numpy  # noqa: F401
import torch.distributed
import torch.nn.parallel
import torch.optim  # noqa: F401


def main() -> None:
    sys.path.append(str(Path.cwd()))
    import train  # type: ignore[import-not-found]

    last = Path(sys.argv.pop(1))
    if last.exists():
        sys.argv += ["--steps", last.read_text().strip()]
    train.main()


if __name__ == "__main__":
    main()
