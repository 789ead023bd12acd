"""Result of the checkpoint before the planned end of a job.

Written with the outcome by the program that closes the rendezvous: the coordinator, or the
controller of the pods. Readers of an earlier release ignore it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SaveResult(StrEnum):
    """Result of a save before a planned end, by which callers choose a remedy."""

    SAVED = "Saved"
    TIMED_OUT = "TimedOut"  # asked, and not complete within the available time
    SAVE_FAILED = "SaveFailed"  # asked, and the workers report that their storage failed
    INTERRUPTED = "Interrupted"  # a worker failed or a node was lost before it was complete
    NOT_SUPPORTED = "NotSupported"  # the scripts of some members do not save on request
    NO_TIME = "NoTime"  # not asked: the grace period leaves no time, or the error has the reason
    NOT_TRAINING = "NotTraining"  # no round was final, or its workers did not all run


NAMED_MEMBERS = 16
"""Maximum number of members named in a report."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Report on the save before a planned end.

    Args:
        result: the result, as stored: earlier releases know no `SAVE_FAILED`, for which it is
            `TIMED_OUT` with an error. Read with `kind`.
        step: the last step that any member reported in the round, or -1.
        checkpoint_step: the last step that a checkpoint of the round contains, or -1.
        unsaved: names of the members without a complete checkpoint, or whose scripts do not save
            on request; `NAMED_MEMBERS` at most.
        error: error of the storage to which the workers could not write, with the rank; with
            `NO_TIME` the reason for which they were not asked.
    """

    result: SaveResult
    step: int = -1
    checkpoint_step: int = -1
    unsaved: tuple[str, ...] = ()
    error: str = ""

    @property
    def kind(self) -> SaveResult:
        """Result of the save."""
        failed = self.error and self.result is SaveResult.TIMED_OUT
        return SaveResult.SAVE_FAILED if failed else self.result

    @property
    def complete(self) -> bool:
        """True if no step that a member reported is lost."""
        covered = 0 <= self.step <= self.checkpoint_step
        return self.result in (SaveResult.SAVED, SaveResult.NOT_TRAINING) or covered

    @property
    def text(self) -> str:
        """Text for people, to follow the name of the stop."""
        if self.result is SaveResult.SAVED:
            step = self.checkpoint_step if self.checkpoint_step >= 0 else self.step
            return f"saved at step {step}" if step >= 0 else "saved before the stop"
        if self.result is SaveResult.NOT_TRAINING:
            return "no workers were training"
        at = f"stopped at step {self.step}" if self.step >= 0 else "stopped"
        last = "no checkpoint was reported"
        if self.checkpoint_step >= 0:
            last = f"the last checkpoint is of step {self.checkpoint_step}"
        if self.result is SaveResult.NO_TIME and self.error:
            return f"{at}; {last}: {self.error}"
        return f"{at}; {last}: {_REASONS[self.kind]}{self._of}"

    @property
    def _of(self) -> str:
        if self.kind is SaveResult.SAVE_FAILED:
            return f": {self.error}"
        if not self.unsaved or self.result is SaveResult.NO_TIME:
            return ""
        more = " …" if len(self.unsaved) == NAMED_MEMBERS else ""
        return f" ({', '.join(self.unsaved)}{more})"


_REASONS = {
    SaveResult.TIMED_OUT: "the requested checkpoint was not complete in time",
    SaveResult.SAVE_FAILED: "the requested checkpoint could not be written",
    SaveResult.INTERRUPTED: "a worker failed or a node was lost before the checkpoint was complete",
    SaveResult.NOT_SUPPORTED: (
        "the scripts were not asked to save, because not all ranks call should_checkpoint or "
        "on_leave"
    ),
    SaveResult.NO_TIME: "the grace period leaves no time to save",
}
