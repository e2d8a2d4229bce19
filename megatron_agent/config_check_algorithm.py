"""Checks of `algorithm`: names, options that nothing takes, and combinations that cannot work."""

from collections.abc import Iterator
from typing import Any

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_algorithm import ADVANTAGE_OPTIONS, LOSS_OPTIONS
from megatron_agent.config_check_names import arguments_problem, name_problem
from megatron_agent.source_reading import parameters, registry_entries

ESTIMATORS = ("trajectory.advantages.registry", "ESTIMATORS")
NEEDS = ("trajectory.advantages.registry", "NEEDS")
POLICY_LOSSES = ("parallel.losses.registry", "POLICY_LOSSES")
OWN_RATIO_LOSSES = ("gspo", "step_gspo")
"""Losses whose ratio is that of a whole sequence or step."""


def check_algorithm_names(config: ExperimentConfig) -> Iterator[str]:
    """Estimator and loss, registered or one's own, and the options given to them."""
    advantage, loss = config.algorithm.advantage, config.algorithm.loss
    for option, section, registry, options in (
        ("algorithm.advantage", advantage, ESTIMATORS, ADVANTAGE_OPTIONS),
        ("algorithm.loss", loss, POLICY_LOSSES, LOSS_OPTIONS),
    ):
        known = registry_entries(*registry)
        problem = name_problem(f"{option}.name", section.name, known)
        if problem:
            yield problem
            continue
        given = {name: getattr(section, name) for name in options if getattr(section, name) is not None}
        yield from _option_problems(option, section.name, known, given, section.args)


def _option_problems(
    option: str, name: str, known: dict[str, str], given: dict[str, Any], args: dict[str, Any]
) -> Iterator[str]:
    reference = known.get(name, name)
    accepted = parameters(reference)
    if accepted.takes_any:
        return
    own = [parameter for parameter in accepted.names if parameter != "inputs"]
    for key in given:
        if key not in own:
            takes = f"it takes {', '.join(own)}" if own else "it takes no options"
            yield f"{option}.{key} is not an option of {name}: {takes}; remove it"
    if name in known and args:
        yield f"{option}.args are for one of your own; write the options of {name} beside its name"
    else:
        yield from arguments_problem(f"{option}.args", reference, args, given_later=None)


def check_credit(config: ExperimentConfig) -> Iterator[str]:
    """What the estimator cannot do without, and what it has no use for."""
    algorithm = config.algorithm
    name = algorithm.advantage.name
    need = registry_entries(*NEEDS).get(name)
    if need == "group" and config.rollout.group_size == 1:
        yield f"rollout.group_size is 1, but {name} compares the episodes of a group; use 2 or more"
    registered = name in registry_entries(*ESTIMATORS)
    in_the_loss = {"teacher"} if algorithm.teacher and algorithm.teacher.top_k > 0 else set()
    for section, value, use in (
        ("critic", algorithm.critic, "reads the values of a critic"),
        ("teacher", algorithm.teacher, "distils from a teacher"),
    ):
        if need == section and value is None:
            yield f"algorithm.advantage.name {name} {use}; add a section algorithm.{section}"
        if registered and need != section and value is not None and section not in in_the_loss:
            users = [key for key, other in registry_entries(*NEEDS).items() if other == section]
            yield f"algorithm.{section} has no effect with {name}; remove it or use {', '.join(users)}"
        if need == section and section in in_the_loss:
            yield (
                f"algorithm.teacher.top_k makes the teacher a term of the loss, but {name} takes the advantages from "
                "it too, so it would count twice; set top_k to 0, or use another estimator"
            )
    critic = algorithm.critic
    if critic and critic.warmup_steps >= config.run.steps:
        yield (
            f"algorithm.critic.warmup_steps {critic.warmup_steps} leaves the policy no step of run.steps "
            f"{config.run.steps}; lower it"
        )
    if config.rollout.group_size == 1:
        if algorithm.filters.zero_variance:
            yield "algorithm.filters.zero_variance drops every group of one episode; raise rollout.group_size"
        if algorithm.reward.normalise == "group":
            yield "algorithm.reward.normalise group makes every reward of a group of one 0; raise rollout.group_size"
    if name == "opd" and not algorithm.advantage.task_weight:
        for option, is_used in (
            ("kl.placement reward", algorithm.kl.coef > 0 and algorithm.kl.placement == "reward"),
            ("reward.normalise", algorithm.reward.normalise != "none"),
            ("reward.overlong", algorithm.reward.overlong is not None),
        ):
            if is_used:
                yield f"algorithm.{option} has no effect: opd reads no rewards while its task_weight is 0; remove it"
    yield from _teacher_engine_problems(config)
    overlong = algorithm.reward.overlong
    if overlong and need == "greedy":
        yield f"algorithm.reward.overlong is not taken from the greedy episodes that {name} compares with; remove it"
    if (algorithm.advantage.task_weight or 0) > 0 and config.rollout.group_size == 1:
        yield "algorithm.advantage.task_weight compares the episodes of a group, but rollout.group_size is 1; use more"
    if overlong and overlong.buffer_tokens > config.agent.max_response_tokens:
        yield (
            f"algorithm.reward.overlong.buffer_tokens {overlong.buffer_tokens} is more than agent.max_response_tokens "
            f"{config.agent.max_response_tokens}; lower it"
        )


def _teacher_engine_problems(config: ExperimentConfig) -> Iterator[str]:
    teacher, rollout = config.algorithm.teacher, config.rollout
    if teacher is None:
        return
    if not teacher.replicas:
        if teacher.tensor_parallel > 1:
            yield "algorithm.teacher.tensor_parallel is of engines, but algorithm.teacher.replicas is 0; raise that"
        return
    if teacher.top_k > 0:
        yield (
            f"algorithm.teacher.replicas {teacher.replicas}: engines score sampled tokens only; set "
            "algorithm.teacher.top_k to 0, or replicas to 0 to hold the teacher on the trainer's ranks"
        )
    if rollout.temperature != 1:
        yield (
            f"rollout.temperature is {rollout.temperature}, but the teacher's engines score at temperature 1; set it "
            "to 1, or algorithm.teacher.replicas to 0"
        )
    if config.agent.max_episode_tokens >= rollout.max_model_len:
        yield (
            f"agent.max_episode_tokens {config.agent.max_episode_tokens} leaves the teacher's engines no room within "
            f"rollout.max_model_len {rollout.max_model_len}: they need one token more; raise the second"
        )


def check_updates(config: ExperimentConfig) -> Iterator[str]:
    """Losses, correction and the number of updates."""
    algorithm, rollout = config.algorithm, config.rollout
    loss, correction = algorithm.loss, algorithm.correction
    episodes = rollout.prompts_per_step * rollout.group_size
    if algorithm.minibatches > episodes:
        yield (
            f"algorithm.minibatches {algorithm.minibatches} is more than the {episodes} episodes of a step "
            f"(rollout.prompts_per_step {rollout.prompts_per_step} x group_size {rollout.group_size}); lower it"
        )
    if loss.name in ("ppo_clip", "dapo", "dr_grpo") and (loss.clip_low or 0) >= 1:
        yield f"algorithm.loss.clip_low is {loss.clip_low}: a ratio is never below 0; use a number under 1"
    if loss.dual_clip is not None and loss.dual_clip <= 1:
        yield f"algorithm.loss.dual_clip is {loss.dual_clip}; it is a bound on the ratio, above 1"
    if loss.constant_tokens is not None and loss.resolved_denominator() != "constant":
        yield (
            f"algorithm.loss.constant_tokens has no effect: the denominator is {loss.resolved_denominator()}; "
            "set algorithm.loss.denominator to constant"
        )
    if correction.is_on() and algorithm.old_logprobs == "rollout":
        yield (
            "algorithm.correction weighs the trainer's old log-probs against the engine's, but algorithm.old_logprobs "
            "rollout takes the engine's for both; use recompute, or drop the correction"
        )
    low, high = correction.band()
    if correction.mask != "none" and not (low < 1 and (high > 1 or correction.mask == "outlier")):
        yield (
            f"algorithm.correction: the band [{low}, {high}] of mask {correction.mask} leaves out a ratio of 1, so "
            "every token of a policy that did not change; set low below 1 and high above"
        )
    if loss.name in OWN_RATIO_LOSSES and correction.tis == "token":
        level = "sequence" if loss.name == "gspo" else "step"
        yield (
            f"algorithm.correction.tis token weighs tokens one by one, but the ratio of {loss.name} is that of a whole "
            f"{level}; use algorithm.correction.tis {level}"
        )
    if loss.name == "reinforce" and algorithm.epochs * algorithm.minibatches > 1:
        yield (
            "algorithm.loss.name reinforce has no ratio, so it is right for one update a step; set algorithm.epochs "
            "and algorithm.minibatches to 1, or use ppo_clip"
        )


def _no_staleness(config: ExperimentConfig) -> str:
    if config.rollout.overlap:
        return "rollout.overlap plays every episode with weights that are at most one step old"
    return "every episode is played with the newest weights"


def inert_algorithm_options(config: ExperimentConfig) -> dict[str, tuple[bool, str]]:
    """Options that do nothing in this configuration: whether that is so, and why."""
    algorithm = config.algorithm
    kl, correction, filters = algorithm.kl, algorithm.correction, algorithm.filters
    updates = algorithm.epochs * algorithm.minibatches
    never_clips = (
        "with one update a step (algorithm.epochs x algorithm.minibatches is 1) and algorithm.old_logprobs recompute "
        "the ratio is 1 everywhere; set algorithm.minibatches or algorithm.epochs to 2, or remove it"
    )
    on_policy = updates == 1 and algorithm.old_logprobs == "recompute"
    no_band = correction.mask == "none"
    sampled_only = algorithm.teacher is None or algorithm.teacher.top_k == 0
    inert = {
        "algorithm.kl.estimator": (kl.coef == 0, "algorithm.kl.coef is 0"),
        "algorithm.kl.placement": (kl.coef == 0, "algorithm.kl.coef is 0"),
        "algorithm.kl.gradient": (
            kl.coef == 0 or kl.placement == "reward",
            "no KL term is in the loss",
        ),
        "algorithm.target_kl": (updates == 1, "there is one update a step, after which nothing is left to skip"),
        "algorithm.advantage.eps": (
            algorithm.advantage.std is False and algorithm.advantage.name != "gigpo",
            "algorithm.advantage.std is false",
        ),
        "algorithm.critic.value_clip": (
            algorithm.critic is not None and algorithm.critic.epochs * algorithm.minibatches == 1,
            "the critic has one update a step, before which its values are the old ones",
        ),
        "algorithm.filters.max_staleness": (
            # With overlap, 0 drops everything, which has a check of its own.
            config.rollout.replay is None and not (config.rollout.overlap and filters.max_staleness == 0),
            _no_staleness(config),
        ),
        "algorithm.correction.cap": (
            correction.tis == "none",
            "algorithm.correction.tis is none; set algorithm.correction.tis to token, step or sequence",
        ),
        "algorithm.correction.low": (no_band, "algorithm.correction.mask is none"),
        "algorithm.correction.high": (
            no_band or correction.mask == "outlier",
            f"algorithm.correction.mask is {correction.mask}",
        ),
        "algorithm.teacher.divergence": (sampled_only, "algorithm.teacher.top_k is 0"),
        "algorithm.teacher.coef": (sampled_only, "algorithm.teacher.top_k is 0"),
        "algorithm.filters.max_resample_rounds": (not filters.zero_variance, "algorithm.filters.zero_variance is off"),
    }
    return inert | {f"algorithm.loss.{name}": (on_policy, never_clips) for name in LOSS_OPTIONS}
