"""Progress reports and coordinated checkpoints for Transformers, Lightning and Accelerate.

    from elasticjob.train.integrations import TransformersCallback

Each class imports its framework when it is first named; without an ElasticJob agent it has no
effect besides its checkpoints. See docs/training.md.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticjob import train

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["AccelerateCheckpoints", "LightningCallback", "TransformersCallback", "newest"]  # noqa: F822

_STEP = re.compile(r"\bstep[=_-]?(\d+)|checkpoint-(\d+)$")


def newest(folder: str | os.PathLike[str], complete: str = "") -> str | None:
    """Return the path of the checkpoint of the highest step in a folder; None if there is none.

    Args:
        folder: the folder with checkpoints named `checkpoint-N`, `step-N` or `...step=N...`.
        complete: a file that a checkpoint folder holds once it is complete; others are ignored.
    """
    found = _checkpoints(Path(folder), complete)
    return str(found[max(found)]) if found else None


def _checkpoints(folder: Path, complete: str = "") -> dict[int, Path]:
    """Return the checkpoints of a folder by step; see `newest` for their names."""
    found: dict[int, Path] = {}
    for path in folder.glob("*"):
        match = _STEP.search(path.name if path.is_dir() else path.stem)
        if match and (not complete or (path / complete).exists()):
            found[int(match[1] or match[2])] = path
    return found


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def _transformers_callback() -> type:
    from transformers import TrainerCallback

    class TransformersCallback(TrainerCallback):  # type: ignore[misc]
        """Callback of `transformers.Trainer`: `Trainer(..., callbacks=[TransformersCallback()])`.

        Reports every optimizer step with the values logged last, every checkpoint, and lets the
        trainer save before a planned stop. Resume with
        `trainer.train(resume_from_checkpoint=newest(output_dir, "trainer_state.json"))`.
        """

        def __init__(self) -> None:
            self._metrics: dict[str, float] = {}

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            self._metrics = _numbers(logs or {})

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            train.progress(state.global_step, **self._metrics)
            if train.should_checkpoint():
                control.should_save = True
            return control

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _checkpointed(state.global_step)

    return TransformersCallback


def _lightning_callback() -> type:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

    class LightningCallback(Callback):  # type: ignore[misc]
        """Callback of Lightning's `Trainer`: `Trainer(..., callbacks=[LightningCallback(folder)])`.

        Reports every optimizer step, saves `step=N.ckpt` in the folder every `every` steps and
        before a planned stop. Resume with `trainer.fit(..., ckpt_path=newest(folder))`.

        Args:
            folder: shared by all nodes.
            every: steps between two checkpoints; 0 for none but before a planned stop.
            keep: number of checkpoints to keep.
        """

        def __init__(self, folder: str | os.PathLike[str], every: int = 0, keep: int = 2) -> None:
            self._folder = Path(folder)
            self._every = every
            self._keep = keep
            self._step = 0

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step == self._step:
                return  # a micro-batch of gradient accumulation
            self._step = trainer.global_step
            train.progress(self._step, **_numbers(_items(trainer.callback_metrics)))
            if train.should_checkpoint() or (self._every and self._step % self._every == 0):
                draft = self._folder / f"unfinished-{self._step}.ckpt"
                trainer.save_checkpoint(draft)  # collective
                if trainer.is_global_zero:
                    draft.rename(self._folder / f"step={self._step}.ckpt")
                    _keep(self._folder, self._keep)
                _checkpointed(self._step)

    return LightningCallback


def _items(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as numbers where they are tensors of one element."""
    return {
        name: value.item() if getattr(value, "numel", lambda: 0)() == 1 else value
        for name, value in metrics.items()
    }


def _accelerate_checkpoints() -> type:
    import accelerate

    class AccelerateCheckpoints:
        """Checkpoints of `accelerate.Accelerator` in a folder that all nodes share.

            checkpoints = AccelerateCheckpoints(accelerator, "checkpoints", every=500)
            step = checkpoints.resume()
            while step < steps:
                ...
                step += 1
                checkpoints.step(step, loss=loss.item())

        `step` reports the step, and saves every `every` steps and before a planned stop. `resume`
        loads the newest complete checkpoint and returns its step; 0 if there is none.
        """

        def __init__(
            self,
            accelerator: accelerate.Accelerator,
            folder: str | os.PathLike[str],
            every: int = 0,
            keep: int = 2,
        ) -> None:
            self._accelerator = accelerator
            self._folder = Path(folder)
            self._every = every
            self._keep = keep

        def resume(self) -> int:
            found = _checkpoints(self._folder)
            if not found:
                return 0
            step = max(found)
            self._accelerator.load_state(str(found[step]))
            return step

        def step(self, step: int, **metrics: float) -> None:
            train.progress(step, **metrics)
            if not (train.should_checkpoint() or (self._every and step % self._every == 0)):
                return
            draft = self._folder / f"unfinished-{step}"
            self._accelerator.save_state(str(draft))
            self._accelerator.wait_for_everyone()
            if self._accelerator.is_main_process:
                target = self._folder / f"checkpoint-{step}"
                shutil.rmtree(target, ignore_errors=True)
                draft.rename(target)
                _keep(self._folder, self._keep)
            _checkpointed(step)

    return AccelerateCheckpoints


def _checkpointed(step: int) -> None:
    """Report a checkpoint once all ranks have written their parts."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        if dist.get_rank():
            return
    train.checkpointed(step)


def _keep(folder: Path, count: int) -> None:
    """Remove all but the checkpoints of the highest steps, and drafts that were never finished.

    A count of 0 keeps all checkpoints.
    """
    for path in folder.glob("unfinished-*"):
        _remove(path)
    if count > 0:
        found = _checkpoints(folder)
        for step in sorted(found)[:-count]:
            _remove(found[step])


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


_CLASSES: dict[str, Callable[[], type]] = {
    "AccelerateCheckpoints": _accelerate_checkpoints,
    "LightningCallback": _lightning_callback,
    "TransformersCallback": _transformers_callback,
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = _CLASSES[name]()
    return made
