"""The training loop. Every rank runs this file (SPMD, under torchrun); rank 0 also owns the rollout side.

    rows -> episodes -> credit -> packed rows -> old, reference, ... log-probs -> updates -> weight sync -> rows

With rollout.overlap the next step's episodes are played from before `credit` on, by the weights that are there then.
Where credit needs what models say of the tokens (a critic, a teacher, a KL in the reward), rows are packed and scored
first.

What a rank holds is set up in session.py; what rank 0 alone does is in rollout_side.py.
"""

import argparse
import sys

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_layout import run_folder
from megatron_agent.evaluate import evaluate
from megatron_agent.metrics import PhaseClock
from megatron_agent.process import run_rank
from megatron_agent.scoring import CreditedRows, score, share
from megatron_agent.session import Session, open_session
from megatron_agent.warm_start import warm_start


def train(config: ExperimentConfig) -> None:
    """Run the experiment, from its newest checkpoint if there is one. Collective over all ranks."""
    with open_session(config) as session:
        done = start(session)
        if done >= config.run.steps and session.rollout:
            session.rollout.display.message(
                f"{done} steps are done and run.steps is {config.run.steps}; set it above {done} to go on"
            )
        for step in range(done + 1, config.run.steps + 1):
            metrics = train_step(session, step)
            if step == config.run.steps or is_due(config.eval.every, step):
                metrics |= evaluate(session, step=step, phase="eval_after" if step == config.run.steps else "eval")
            if session.rollout:
                session.rollout.log(metrics, step=step)
            if step == config.run.steps or is_due(config.checkpoint.every, step):
                session.save(step)
        if config.checkpoint.export_hf:
            session.export(run_folder(config) / "hf")
        if session.rollout:
            session.rollout.write_report()


def start(session: Session) -> int:
    """Bring weights and fleet to where the run begins or goes on; returns the last step that is done."""
    resumed_from = session.newest_checkpoint()
    if resumed_from is None:
        if session.rollout:
            session.rollout.forget_after(-1)
        if session.config.sft:
            warm_start(session)
    session.start_training()
    done = session.restore(resumed_from) if resumed_from else 0
    session.sync_weights(version=done)
    if done == 0:
        metrics = evaluate(session, step=0, phase="eval_before")
        if session.rollout:
            session.rollout.log(metrics, step=0)
    return done


def train_step(session: Session, step: int) -> dict[str, float]:
    """Act, give credit, update, hand the new weights to the fleet. Returns the metrics on rank 0, {} elsewhere.

    With rollout.overlap the fleet gets the weights from before this step's update and plays the next step's episodes
    with them meanwhile, so those are one step behind (docs/architecture.md, One step).
    """
    algorithm, overlap = session.config.algorithm, session.config.rollout.overlap
    clock, sync = PhaseClock(), {}
    with clock("rollout"):
        result = session.training_episodes(step)
    if overlap:
        with clock("sync"):
            sync = start_next_rollout(session, step)
    with clock("credit"):
        batch = session.batches.build(result.groups, step=step) if session.batches and result else None
        shared, untrained = share(batch)
    # The old log-probs are the trainer's from before the first update. Where that is the only one, its own forward
    # pass computes them. By which weights the episodes were sampled is another matter: that is corrected for.
    on_policy = algorithm.epochs * len(shared) == 1
    with clock("logprobs"):
        minibatches, credit_metrics = score(session, shared, batch, on_policy=on_policy)
    with clock("update"):
        frozen = algorithm.critic is not None and step <= algorithm.critic.warmup_steps
        critic_updates = update_critic(session, minibatches)
        updates = [] if frozen else update_policy(session, minibatches, on_policy=on_policy)
        compared = minibatches[0].rows if frozen and minibatches else untrained
        comparison = session.compare(compared) if compared else {}
    if not overlap:
        with clock("sync"):
            sync = session.sync_weights(version=step)
    if session.rollout is None or result is None or batch is None:
        return {}
    metrics = session.rollout.step_metrics(step, result, batch, updates, critic_updates, sync, clock.seconds)
    return metrics | credit_metrics | comparison


def start_next_rollout(session: Session, step: int) -> dict[str, float]:
    """Before the update of `step`: hand its weights to the fleet, which plays the next step's episodes with them.
    Nothing follows the last step. Returns what the sync took."""
    if step == session.config.run.steps:
        return {}
    sync = session.refresh_fleet(version=step - 1)
    session.start_rollout(step + 1)
    return sync


def update_policy(session: Session, minibatches: list[CreditedRows], *, on_policy: bool) -> list[dict[str, float]]:
    """All updates of a rollout batch, or those until the policy is algorithm.target_kl from the old one."""
    target_kl = session.config.algorithm.target_kl
    updates: list[dict[str, float]] = []
    for _ in range(session.config.algorithm.epochs):
        for rows, denominator, *_ in minibatches:
            updates.append(session.update(rows, denominator=denominator, on_policy=on_policy))
            if target_kl is not None and updates[-1]["approx_kl"] > target_kl:
                return updates
    return updates


def update_critic(session: Session, minibatches: list[CreditedRows]) -> list[dict[str, float]]:
    """The critic's updates on a rollout batch; none without a critic."""
    critic = session.config.algorithm.critic
    return [
        session.update_critic(critic_rows, denominator=num_values)
        for _ in range(critic.epochs if critic else 0)
        for _, _, num_values, critic_rows in minibatches
        if num_values > 0
    ]


def is_due(every: int, step: int) -> bool:
    """True at each `every`-th step; never for 0."""
    return every > 0 and step % every == 0


def main(argv: list[str] | None = None) -> int:
    """Entry point of every rank of `megatron-agent train`."""
    parser = argparse.ArgumentParser(prog="megatron_agent.train", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(argv)
    return run_rank(options.config, options.overrides, train)


if __name__ == "__main__":
    sys.exit(main())
