"""Calls of functions side by side, in threads that end with their caller.

An exception of a signal handler in the caller waits for their end too: they would go on with a file
that is closed. Without a thread, as at the end of the process, the calls are made one by one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Beside:
    """Call of a function in a thread beside a caller that a signal handler may interrupt.

    Each attribute is set once, by one thread: an interrupted caller can end its wait again.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._has_begun = self._is_given_up = False
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def start(self) -> bool:
        """Start the thread; return False if none can start, as at the end of the process."""
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:
            return False
        return True

    def _run(self) -> None:
        self._has_begun = True
        try:
            if not self._is_given_up:
                self._result = self._function()
        except BaseException as error:  # raised by `result`
            self._error = error
        finally:
            self._ended.set()

    def result(self) -> Any:
        """Wait for the end of the started function; return its result or raise its error."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def end(self) -> None:
        """Wait until the function has ended; it does not begin any more."""
        self._is_given_up = True
        if self._has_begun:
            self._ended.wait()


def side_by_side(first: Callable[[], Any], *others: Callable[[], Any]) -> list[Any]:
    """Call functions, all but the first in threads; return their results once all have ended.

    Raises the first error, also that of a signal handler, once none of them runs. Where no thread
    can start the functions are called one after another.
    """
    beside = [_Beside(function) for function in others]
    try:
        has_thread = [each.start() for each in beside]
        results = [first()]
        for each, function, is_started in zip(beside, others, has_thread):
            results.append(each.result() if is_started else function())
        return results
    finally:
        _end_all(beside)


def _end_all(beside: Sequence[_Beside]) -> None:
    try:
        for each in beside:
            each.end()
    except BaseException:  # of a signal handler
        _end_all(beside)
        raise
