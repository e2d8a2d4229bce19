"""Episodes that go wrong: each failure stays in its own episode, and says what and where."""

import asyncio
import pickle
import sqlite3
import threading
import time
from dataclasses import replace

import pytest
from scripted_model import END, ScriptedModel, completion, make_config, make_request, make_row, play

import megatron_agent.rewards
from megatron_agent.batching import BatchBuilder
from megatron_agent.envs.base import Action, AgentEnv, EnvStep, Observation
from megatron_agent.errors import ConfigError, DataError, FleetError
from megatron_agent.model_folders.tiny_qwen3 import build
from rollout.client import ReplicaDiedError
from rollout.episode_runner import EpisodeRunner
from trajectory.steps import StopReason, TrajectoryGroup, TrajectoryStatus

GATE = threading.Event()
"""Set at the end of each test, so that hanging threads return."""
CLOSED: list[str] = []


class Troubled(AgentEnv):
    """Does in its n-th call of a method what `trouble` says: `{"step 2": "raise"}`; otherwise goes on."""

    def __init__(self, *, trouble: dict[str, str] | None = None, name: str = "env") -> None:
        self._trouble = trouble or {}
        self._name = name
        self._count = 0
        self._database = sqlite3.connect(":memory:")  # refuses to be used from another thread

    def reset(self, row):
        self._act("reset")
        return Observation(messages=[{"role": "user", "content": "at a1"}])

    def step(self, action: Action) -> EnvStep:
        self._count += 1
        self._act(f"step {self._count}")
        self._database.execute("select 1")
        return EnvStep(
            messages=[{"role": "user", "content": "again"}],
            terminated="goal" in action.text,
            reward=float("goal" in action.text),
        )

    def close(self) -> None:
        CLOSED.append(self._name)
        self._act("close")

    def _act(self, place: str) -> None:
        match self._trouble.get(place):
            case "raise":
                raise RuntimeError(f"no {place}")
            case "time out":
                raise TimeoutError("the server did not answer")
            case "exit":
                raise SystemExit(1)
            case "hang":
                GATE.wait()
            case "sleep":
                time.sleep(0.3)


class AsyncTroubled(Troubled):
    """The same with an async step, and one that only turns out to be async when it is called."""

    async def step(self, action: Action) -> EnvStep:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._trouble.get(f"step {self._count + 1}") == "hang":
            await asyncio.sleep(3600)
        self._count += 1
        return EnvStep(terminated="goal" in action.text, messages=[{"role": "user", "content": "again"}])

    def reset(self, row):
        async def later():
            return Observation(messages=[{"role": "user", "content": "at a1"}])

        return later()


class Unsendable(Troubled):
    """Leaves something in `info` that no process can send to another."""

    def step(self, action: Action) -> EnvStep:
        return replace(super().step(action), info={"lock": threading.Lock()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    build(path)
    return path


@pytest.fixture(autouse=True)
def _let_hanging_threads_go():
    GATE.clear()
    CLOSED.clear()
    yield
    GATE.set()


def make(folder, env="Troubled", agent=None, **rollout):
    options = {"env": f"test_episodes:{env}", "max_steps": 5, **(agent or {})}
    return make_config(folder, agent=options, **{"step_timeout_s": 5, "episode_timeout_s": 20, **rollout})


def trouble_row(name="env", **fields):
    trouble = {place.replace("_", " "): what for place, what in fields.items()}
    return make_row([], env_kwargs={"trouble": trouble, "name": name})


def run(folder, row, *replies, **options):
    return play(make(folder, **options), ScriptedModel(*(replies or ["left" + END] * 5)), row)


def test_an_environment_that_raises_in_step_2_keeps_step_1(folder):
    trajectory = run(folder, trouble_row(step_2="raise"))
    assert trajectory.status is TrajectoryStatus.ENV_FAILED
    assert trajectory.error == "step 2: RuntimeError: no step 2"
    (step,) = trajectory.steps
    assert step.response_text == "left"
    assert (step.stop_reason, step.terminated, step.truncated) == (StopReason.ENV_FAILED, False, False)
    assert step.next_observation == step.feedback
    assert CLOSED == ["env"]


def test_the_group_of_a_failed_episode_still_trains(folder):
    failed = run(folder, trouble_row(step_2="raise"))
    won = run(folder, trouble_row(), "goal" + END)
    lost = run(folder, trouble_row())
    group = TrajectoryGroup(group_id="group", trajectories=(failed, won, lost))
    builder = BatchBuilder(make(folder), data_parallel_size=1, pad_multiple=1)
    kept, drops = builder.kept([group], step=1)
    assert kept[0].trajectories == (won, lost)
    assert drops == {"env_failed": 1}
    batch = builder.build([group], step=1)
    assert batch.minibatches[0].denominator == 2 + 5 * 2


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        ({"reset": "raise"}, "step 1: RuntimeError: no reset"),
        ({"step_1": "time out"}, "step 1: TimeoutError: the server did not answer"),
        ({"step_1": "exit"}, "step 1: RuntimeError: SystemExit: 1"),
        ({"step_1": "raise", "close": "raise"}, "step 1: RuntimeError: no step 1"),
    ],
)
def test_what_failed_is_said(folder, trouble, error):
    trajectory = run(folder, trouble_row(**trouble))
    assert trajectory.status is TrajectoryStatus.ENV_FAILED
    assert trajectory.error == error
    assert CLOSED == ["env"]


def test_arguments_that_the_environment_does_not_take(folder):
    trajectory = run(folder, make_row([], env_kwargs={"levle": 3}))
    assert trajectory.status is TrajectoryStatus.ENV_FAILED
    assert "unexpected keyword argument 'levle'" in (trajectory.error or "")


@pytest.mark.parametrize("env", ["Troubled", "AsyncTroubled"])
def test_a_step_that_hangs_fails_after_the_step_timeout(folder, env):
    started = time.monotonic()
    trajectory = run(folder, trouble_row(step_2="hang"), env=env, step_timeout_s=0.5)
    assert time.monotonic() - started < 5
    assert trajectory.status is TrajectoryStatus.ENV_FAILED
    assert trajectory.error == f"step 2: TimeoutError: {env}.step took longer than rollout.step_timeout_s=0.5"
    assert len(trajectory.steps) == 1
    assert CLOSED == ["env"]


@pytest.mark.parametrize("env", ["Troubled", "AsyncTroubled"])
def test_an_episode_that_hangs_is_truncated_after_the_episode_timeout(folder, env):
    started = time.monotonic()
    trajectory = run(folder, trouble_row(step_3="hang"), env=env, episode_timeout_s=1.5)
    assert time.monotonic() - started < 8
    assert trajectory.status is TrajectoryStatus.TRUNCATED
    assert trajectory.error == "episode time-out"
    assert [step.stop_reason for step in trajectory.steps] == [StopReason.NONE, StopReason.TIME_LIMIT]
    assert trajectory.steps[-1].truncated
    assert trajectory.steps[-1].next_observation == trajectory.steps[-1].feedback
    assert CLOSED == ["env"]


def test_an_episode_without_a_whole_step_is_truncated_and_empty(folder):
    trajectory = run(folder, trouble_row(reset="hang"), episode_timeout_s=0.2)
    assert (trajectory.status, trajectory.steps) == (TrajectoryStatus.TRUNCATED, ())


def test_an_episode_out_of_time_is_scored_like_other_truncated_ones(folder, monkeypatch):
    monkeypatch.setattr(megatron_agent.rewards, "own", lambda replies, row: len(replies) / 10, raising=False)
    trajectory = run(
        folder,
        trouble_row(step_3="hang"),
        agent={"reward": "megatron_agent.rewards:own"},
        episode_timeout_s=1.5,
    )
    assert trajectory.outcome_reward == 0.2


def test_sync_environments_never_hold_up_others(folder):
    """Two hanging episodes, one that sleeps, and one that does not wait for any of them."""
    config = make(folder, step_timeout_s=2.5)
    model = ScriptedModel(*["left" + END] * 4, "goal" + END)
    rows = {
        "hangs in reset": trouble_row(reset="hang"),
        "hangs in step": trouble_row(step_1="hang", close="hang"),
        "sleeps": trouble_row(step_1="sleep"),
        "quick": trouble_row(),
    }

    async def play_all():
        runner = EpisodeRunner(config, model)  # pyright: ignore[reportArgumentType]
        finished = {}

        async def one(name, row):
            started = time.monotonic()
            trajectory = await runner.play(make_request(row, name))
            assert trajectory is not None
            finished[name] = (trajectory.status, time.monotonic() - started)

        await asyncio.gather(*(one(name, row) for name, row in rows.items()))
        return finished

    finished = asyncio.run(play_all())
    assert finished["quick"][0] is finished["sleeps"][0] is TrajectoryStatus.OK
    assert finished["quick"][1] < 2.0
    assert finished["sleeps"][1] < 2.4
    assert finished["hangs in reset"][0] is finished["hangs in step"][0] is TrajectoryStatus.ENV_FAILED
    assert max(seconds for _, seconds in finished.values()) < 9


def test_two_hundred_hanging_episodes_leave_room_for_one_more(folder):
    config = make(folder, step_timeout_s=3)
    model = ScriptedModel("goal" + END)

    async def play_all():
        runner = EpisodeRunner(config, model)  # pyright: ignore[reportArgumentType]
        hanging = [
            asyncio.ensure_future(runner.play(make_request(trouble_row(reset="hang"), f"h{number}")))
            for number in range(200)
        ]
        await asyncio.sleep(0.5)
        trajectory = await asyncio.wait_for(runner.play(make_request(trouble_row(), "one more")), 2)
        assert not any(task.done() for task in hanging)
        await asyncio.gather(*hanging)
        assert trajectory is not None
        return trajectory

    trajectory = asyncio.run(play_all())
    assert trajectory.status is TrajectoryStatus.OK


def test_an_environment_stays_in_its_thread(folder):
    """sqlite3 refuses connections from another thread; so do browsers and many simulators."""
    trajectory = run(folder, trouble_row(), *["left" + END] * 4, "goal" + END)
    assert trajectory.error is None
    assert len(trajectory.steps) == 5


def test_a_method_that_returns_an_awaitable_is_awaited(folder):
    trajectory = run(folder, trouble_row(), "goal" + END, env="AsyncTroubled")
    assert trajectory.error is None


@pytest.mark.parametrize(
    ("failure", "cost"), [("raise", "no verdict"), ("hang", "took longer"), ("nan", "not a finite")]
)
def test_a_reward_that_fails_is_the_episodes_failure(folder, monkeypatch, failure, cost):
    def own(replies, row):
        if failure == "hang":
            GATE.wait()
        if failure == "raise":
            raise KeyError("no verdict")
        return float("nan")

    monkeypatch.setattr(megatron_agent.rewards, "own", own, raising=False)
    agent = {"reward": "megatron_agent.rewards:own"}
    trajectory = run(folder, trouble_row(), "left" + END, "goal" + END, agent=agent, step_timeout_s=0.6)
    assert trajectory.status is TrajectoryStatus.ENV_FAILED
    assert (trajectory.error or "").startswith("reward: ")
    assert cost in (trajectory.error or "")
    assert trajectory.steps[-1].stop_reason is StopReason.TERMINATED
    assert trajectory.outcome_reward == 0


def test_seconds_by_phase(folder, monkeypatch):
    monkeypatch.setattr(megatron_agent.rewards, "own", lambda replies, row: time.sleep(0.1) or 1.0, raising=False)
    agent = {"reward": "megatron_agent.rewards:own"}
    trajectory = run(folder, trouble_row(step_1="sleep"), "goal" + END, agent=agent)
    assert set(trajectory.timings) == {"generate_s", "environment_s", "reward_s", "total_s"}
    assert 0.3 <= trajectory.timings["environment_s"] < trajectory.timings["total_s"]
    assert trajectory.timings["reward_s"] >= 0.1


def test_ids_and_logprobs_of_different_length_stop_the_run(folder):
    """The engine is the system's own: this is not the environment's failure, and nothing may train on it."""
    replies = ["left" + END, lambda: completion("right" + END, logprobs=[-0.1])]
    with pytest.raises(FleetError, match="episode episode, step 2: the engine returned 2 ids but 1 log-probs"):
        run(folder, trouble_row(), *replies)
    assert CLOSED == ["env"]


def test_a_dead_replica_hands_the_episode_back(folder):
    def dead():
        raise ReplicaDiedError("replica-0 died")

    model = ScriptedModel("left" + END, dead)
    runner = EpisodeRunner(make(folder), model)  # pyright: ignore[reportArgumentType]
    assert asyncio.run(runner.play(make_request(trouble_row()))) is None
    assert CLOSED == ["env"]
    assert model.forgotten == ["episode"]


@pytest.mark.parametrize("wrong", [{"env": "frozen_lak"}, {"flow": "agent_env_lop"}, {"reward": "numerc"}])
def test_wrong_names_stop_the_run(folder, wrong):
    with pytest.raises(ConfigError, match="did you mean"):
        run(folder, make_row([]), "goal" + END, agent={"env": "frozen_lake", "max_steps": 1, **wrong})


async def _all_of(runner: EpisodeRunner, count: int) -> dict[str, bytes | None]:
    ended: dict[str, bytes | None] = {}
    deadline = time.monotonic() + 20
    while len(ended) < count:
        assert time.monotonic() < deadline
        ended |= dict(await runner.finished(5))
    return ended


def test_a_batch_of_episodes_comes_back_as_each_ends(folder):
    def dead():
        raise ReplicaDiedError("replica-1 died")

    config = make(folder, step_timeout_s=10)
    model = ScriptedModel(lambda: dead() if "b" in model.asked_by else completion("goal" + END))

    async def play_all():
        runner = EpisodeRunner(config, model)  # pyright: ignore[reportArgumentType]
        assert await runner.finished(0.05) == []
        slow = make_request(trouble_row(step_1="hang"), "slow")
        await runner.take([slow, *(make_request(trouble_row(), name) for name in ("a", "b"))])
        first = await _all_of(runner, 2)
        assert first["b"] is None
        assert pickle.loads(first["a"] or b"").steps[0].response_text == "goal"
        GATE.set()
        (name, packed), *others = await runner.finished(5)
        assert (name, others) == ("slow", [])
        assert pickle.loads(packed or b"").status is TrajectoryStatus.OK

    asyncio.run(play_all())


def test_an_episode_goes_to_the_replica_that_was_named(folder):
    model = ScriptedModel("goal" + END)
    runner = EpisodeRunner(make(folder), model)  # pyright: ignore[reportArgumentType]
    asyncio.run(runner.play(replace(make_request(trouble_row()), replica=3)))
    assert model.placed == {"episode": 3}


def test_a_failure_of_the_system_reaches_the_manager(folder):
    async def play_all():
        model = ScriptedModel(lambda: completion("right" + END, logprobs=[-0.1]))
        runner = EpisodeRunner(make(folder), model)  # pyright: ignore[reportArgumentType]
        await runner.take([make_request(trouble_row())])
        with pytest.raises(FleetError, match="the engine returned 2 ids but 1 log-probs"):
            await runner.finished(10)

    asyncio.run(play_all())


def test_what_cannot_be_sent_is_named(folder):
    async def play_all():
        runner = EpisodeRunner(make(folder, env="Unsendable"), ScriptedModel("goal" + END))  # pyright: ignore[reportArgumentType]
        await runner.take([make_request(trouble_row(), "e1")])
        with pytest.raises(DataError, match=r"episode e1 cannot leave its runner: .*only numbers, text and arrays"):
            await runner.finished(10)

    asyncio.run(play_all())
