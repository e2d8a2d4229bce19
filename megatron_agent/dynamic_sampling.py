"""The episodes of one training step: one round, or with `filters.zero_variance` as many as fill the batch.

A group whose returns are all equal teaches a group-relative estimator nothing; further rows are played in its place
(dynamic sampling, Yu et al. 2025, DAPO).
"""

from megatron_agent.session import Session
from parallel.distribute import broadcast_object
from rollout.episodes import RolloutResult


def play_training_rows(session: Session, step: int) -> RolloutResult | None:
    """Play the step's rows; all rounds together on rank 0, None elsewhere. Collective."""
    config = session.config
    wanted = config.rollout.prompts_per_step
    max_rounds = config.algorithm.filters.max_resample_rounds if config.algorithm.filters.zero_variance else 0
    rounds: list[RolloutResult] = []
    missing, started = wanted, 0
    for rounds_left in range(max_rounds, -1, -1):
        if session.rollout:
            session.rollout.start_training_rows(step, count=missing, first_place=started)
        started += missing
        result = session.run_episodes(step=step, phase="train")
        if result:
            rounds.append(result)
        if rounds_left:
            missing = broadcast_object(_num_missing(session, rounds, step) if result else None)
        if not rounds_left or not missing:
            break
    return _together(rounds) if rounds else None


def _num_missing(session: Session, rounds: list[RolloutResult], step: int) -> int:
    """How many rows still have to give a group; 0 where nothing more can be played."""
    assert session.batches
    assert session.rollout
    if session.rollout.fleet is None:  # a recording holds all rounds
        return 0
    groups = [group for result in rounds for group in result.groups]
    kept, _ = session.batches.kept(groups, step=step)
    return max(0, session.config.rollout.prompts_per_step - len(kept))


def _together(rounds: list[RolloutResult]) -> RolloutResult:
    return RolloutResult(
        groups=[group for result in rounds for group in result.groups],
        seconds=sum(result.seconds for result in rounds),
        num_retries=sum(result.num_retries for result in rounds),
    )
