"""Runs blocking user code beside the event loop, in threads that nothing has to wait for.

event loop --submit--> queue --> daemon thread: call --> result to the event loop
    a time-out stops the wait; the thread stays with its call, and the next call gets a new thread
"""

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

_numbers = itertools.count()


class WorkerThread:
    """Calls one after another in one daemon thread, which starts with the first.

    An environment gets a thread of its own: libraries that are bound to the thread that made them work, and one that
    hangs keeps no other waiting, nor the end of the process. Python cannot end a thread: a call that nobody waits for
    any more keeps it until it returns, and what is called meanwhile gets a new one.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "asyncio.Future[Any]":
        """A future of `function(*arguments)`. Cancelling it stops the wait, not the call."""
        loop = asyncio.get_running_loop()
        if self._worker is None or self._worker.is_busy:
            self.stop()
            self._worker = _Worker()
        future = loop.create_future()
        self._worker.put(loop, future, lambda: function(*arguments))
        return future

    def stop(self) -> None:
        """Let the thread end after the call it is in."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


class _Worker:
    """A thread and what it has to call; `is_busy` from `put` until the call has returned."""

    def __init__(self) -> None:
        self.is_busy = False
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"user-code-{next(_numbers)}", daemon=True).start()

    def put(self, loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Any]", call: Callable[[], Any]) -> None:
        self.is_busy = True
        self._calls.put((loop, future, call))

    def stop(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            loop, future, call = item
            try:
                result, error = call(), None
            except BaseException as raised:  # SystemExit of user code too belongs to the caller, not to this thread
                result, error = None, raised
            self.is_busy = False
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop was closed meanwhile; nobody waits for this result
                return


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():  # the caller stopped waiting
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # a future refuses StopIteration, and the others would end the event loop
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


async def run_in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Await one blocking call in a thread of its own."""
    thread = WorkerThread()
    try:
        return await thread.submit(function, *arguments)
    finally:
        thread.stop()
