"""Episodes are played on a thread of rank 0's, so that the main loop can train meanwhile.

    main loop, rank 0                                 player thread
    start(play) ---------------------------------->   play(): RolloutManager, round after round
    rollout.overlap: credit, log-probs, update        |  Ray waits of at most a second, `progress` after each
    wait() looks every second, beats for the ranks    |
      returns or raises   <------------------------   result, None (replicas want weights), or what was raised
    weight sync, next start(play)
    close() -------------- stop ------------------>   the next `progress` raises, the thread ends

So exactly one thread uses the RolloutManager at any time: this one between `start` and the return of `wait`, the main
loop otherwise. Without rollout.overlap the main loop waits as soon as it has started.
"""

import threading
from collections.abc import Callable

from rollout.episodes import RolloutResult

POLL_S = 1.0
"""How often who waits looks after the other ranks and the display."""
CLOSE_S = 10.0
"""How long the end of a run waits for the thread. It is a daemon: one that is late ends with the process."""

Progress = Callable[[int, int], None]
"""(episodes that are done, all episodes of the round)."""
Play = Callable[[Progress], RolloutResult | None]


class EpisodePlayer:
    """Runs one call at a time beside the main loop."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._done = (0, 0)
        self._result: RolloutResult | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """True from `start` until `wait` has returned or raised."""
        return self._thread is not None

    def start(self, play: Play) -> None:
        """Begin `play`; its progress is kept for whoever waits."""
        assert self._thread is None, "the call before has to be waited for first"
        self._done, self._result, self._error = (0, 0), None, None
        self._thread = threading.Thread(target=self._work, args=(play,), name="episodes", daemon=True)
        self._thread.start()

    def wait(self, progress: Progress) -> RolloutResult | None:
        """What the call gives; raises what it raised. `progress` is called here, about once a second.

        The call ends by the time-outs of its own: of episodes, completions and restarts.
        """
        assert self._thread is not None, "nothing was started"
        self._thread.join(timeout=POLL_S)
        while self._thread.is_alive():
            progress(*self._done)
            self._thread.join(timeout=POLL_S)
        self._thread = None
        if self._error is not None:
            raise self._error
        return self._result

    def close(self) -> None:
        """Stop what is played; nobody wants its result any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_S)

    def _work(self, play: Play) -> None:
        try:
            self._result = play(self._note)
        except BaseException as error:  # belongs to the main loop, which raises it where it waits
            self._error = error

    def _note(self, done: int, total: int) -> None:
        if self._stop.is_set():
            raise InterruptedError("the run ends; what is still played is given up")
        self._done = (done, total)
