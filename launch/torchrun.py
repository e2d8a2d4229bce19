"""torchrun as the local launcher starts it: a failed rank's exit code becomes its own, told in one line.

Takes torchrun's own arguments. Plain torchrun works as well; it ends with code 1 and a traceback of its own.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.process_tree import adopt_orphans, end_descendants, end_with_parent

TAIL_LINES = 25
LEFTOVER_GRACE_S = 3.0
"""How long processes that the ranks left behind get to notice that their parent is gone."""


def main(argv: Sequence[str]) -> int:
    """Run the ranks to their end; the exit code of the first rank that failed, or 128 + signal."""
    end_with_parent()
    adopt_orphans()
    # Imported late: torch takes seconds, in which the parent may already have died.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable(logging.ERROR)  # torchrun's own account of a failure; ours is below
    arguments = parse_args(argv)
    try:
        run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        how = f"exit code {code}" if failure.exitcode >= 0 else f"signal {-failure.exitcode}"
        if failure.local_rank != 0:  # the errors of a node's first rank are on the terminal already
            print(_tail(Path(arguments.log_dir), failure.local_rank), file=sys.stderr)
        print(f"rank {rank} ended with {how}; all ranks were stopped. Logs: {arguments.log_dir}", file=sys.stderr)
        return code
    except SignalException as error:
        return 128 + error.sigval
    finally:
        end_descendants((), grace_s=LEFTOVER_GRACE_S)
    return 0


def _tail(logs: Path, local_rank: int) -> str:
    lines: list[str] = []
    for log in logs.glob(f"*/attempt_0/{local_rank}/stderr.log"):
        lines += log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
