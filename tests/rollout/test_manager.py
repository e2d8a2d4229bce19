"""The manager of the runners, with Ray's calls scripted: none that fails goes unnoticed."""

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_records import one_step_group
from ray.exceptions import RayActorError, RayTaskError
from scripted_model import make_config, make_row

import rollout.episodes
from megatron_agent.errors import DataError, FleetError, MegatronAgentError
from rollout.dispatch import EpisodeRequest
from rollout.episodes import RolloutManager

PENDING = object()


class Call:
    """A Ray reference; `look()` is its result, an exception to raise, or PENDING."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self.look = look


class Runner:
    """Plays what it takes at once; `take` and `finished` may fail."""

    def __init__(self, *, take: Exception | None = None, finished: Exception | None = None) -> None:
        self.ended: list[tuple[str, bytes]] = []
        self._errors = {"take": take, "finished": finished}
        self.take = SimpleNamespace(remote=self._take)
        self.finished = SimpleNamespace(remote=lambda timeout_s: Call(self._finished))

    def _take(self, requests: list[EpisodeRequest]) -> Call:
        if self._errors["take"] is None:
            trajectory = pickle.dumps(one_step_group(1.0).trajectories[0])
            self.ended += [(request.trajectory_id, trajectory) for request in requests]
        return Call(lambda: self._errors["take"])

    def _finished(self) -> Any:
        if self._errors["finished"] is not None:
            return self._errors["finished"]
        ended, self.ended = self.ended, []
        return ended or PENDING


class ScriptedRay:
    """`wait` and `get` of these calls; it fails where nothing will ever be ready."""

    def __init__(self) -> None:
        self.results: dict[Call, Any] = {}
        self.num_idle = 0

    def wait(self, calls: list[Call], *, num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        for call in calls:
            if self.results.get(call, PENDING) is PENDING:
                self.results[call] = call.look()
        ready = [call for call in calls if self.results[call] is not PENDING][:num_returns]
        self.num_idle = 0 if ready else self.num_idle + 1
        assert self.num_idle < 10, "waits for ever"
        return ready, [call for call in calls if call not in ready]

    def get(self, call: Call) -> Any:
        if isinstance(self.results[call], Exception):
            raise self.results[call]
        return self.results[call]


class ScriptedManager(RolloutManager):
    """Starts these runners, one after another."""

    def __init__(self, runners: list[Runner]) -> None:
        self.left = runners
        fleet: Any = SimpleNamespace(ensure_healthy=lambda: None, needs_weights=False)
        super().__init__(make_config("folder", runners=1, replicas=1), fleet)
        self.start([make_row()], step=1, group_size=3, temperature=1.0)

    def _start_runners(self, numbers) -> None:
        for number in numbers:
            self._runners[number] = self.left.pop(0)


@pytest.fixture(autouse=True)
def _scripted_ray(monkeypatch):
    monkeypatch.setattr(rollout.episodes, "ray", ScriptedRay())


def task_error(cause: Exception) -> Exception:
    """As Ray raises what a task raised."""
    return cast(Exception, RayTaskError("take", "the runner's traceback", cause).as_instanceof_cause())


def test_episodes_that_a_runner_could_not_take_end_the_run():
    manager = ScriptedManager([Runner(take=task_error(ModuleNotFoundError("No module named 'rows'")))])
    with pytest.raises(RayTaskError, match="the runner's traceback"):
        manager.run()


@pytest.mark.parametrize("call", ["take", "finished"])
def test_an_error_with_a_remedy_comes_without_the_runners_traceback(call):
    manager = ScriptedManager([Runner(**{call: task_error(DataError("row 3 has no prompt"))})])
    with pytest.raises(MegatronAgentError) as raised:
        manager.run()
    assert type(raised.value) is DataError


@pytest.mark.parametrize("failing", [{"take"}, {"finished"}, {"take", "finished"}])
def test_the_episodes_of_a_runner_that_died_are_played_by_the_next(failing):
    manager = ScriptedManager([Runner(**{call: RayActorError() for call in failing}), Runner()])
    result = manager.run()
    assert result is not None
    assert len(result.groups[0].trajectories) == 3
    assert result.num_retries == 3
    assert not manager.left


def test_runners_that_keep_dying_end_the_run():
    manager = ScriptedManager([Runner(take=RayActorError()) for _ in range(20)])
    with pytest.raises(FleetError, match="lost its replica or runner"):
        manager.run()
