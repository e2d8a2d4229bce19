"""What the launcher's tests run on every rank: `python -m rank_program ACTION FOLDER`. Imports nothing heavy."""

import os
import subprocess
import sys
import time
from pathlib import Path

action, folder, rank = sys.argv[1], Path(sys.argv[2]), os.environ["RANK"]

if action == "succeed":
    print(f"output of rank {rank}")
elif action == f"fail-{rank}":
    print(f"rank {rank} has no luck", file=sys.stderr)
    sys.exit(7)
else:
    if action == "fork":  # a process that neither dies with its parent nor answers to SIGTERM at once
        loop = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
        subprocess.Popen([sys.executable, "-c", loop, str(folder)], start_new_session=True)
    (folder / f"started-{rank}").touch()
    time.sleep(120)
