"""No process left behind: orphans come to the launcher, which ends them.

    launcher (adopts orphans)
      └─ torchrun (ends with the launcher)
           └─ ranks ─ Ray ─ engines ...

Each level may be killed at any moment. On Linux the launcher is the child subreaper, so whatever outlives its
parent becomes its child and is found; torchrun asks the kernel for SIGTERM when the launcher dies. Elsewhere both
calls do nothing, and only the processes that are still linked to the launcher are found.
"""

import ctypes
import signal
import sys
from collections.abc import Collection

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent died."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Ask for SIGTERM when the process that started this one dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """All processes below this one."""
    return psutil.Process().children(recursive=True)


def end_descendants(spared: Collection[psutil.Process], *, grace_s: float) -> None:
    """End everything below this process except `spared`: wait `grace_s`, SIGTERM, wait again, SIGKILL."""
    for action in (None, signal.SIGTERM, signal.SIGKILL):
        targets = [process for process in descendants() if process not in spared]
        if not targets:
            return
        if action is not None:
            for process in targets:
                try:
                    process.send_signal(action)
                except psutil.NoSuchProcess:
                    continue
        psutil.wait_procs(targets, timeout=grace_s)
