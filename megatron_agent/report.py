"""Placeholder."""
from pathlib import Path
def write_report(run_dir: Path, *, num_episodes: int) -> Path:
    return run_dir / "report.html"
