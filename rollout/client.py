"""A runner's way to the fleet: which replica serves which episode, and the connections to them.

    episode --await client(prompt)--> connection to its replica --> answer
    the first request to a replica connects; others that come meanwhile wait for the same attempt

Who waits gets an answer, ReplicaDiedError (play the episode again), or FleetError (the run ends).
"""

import asyncio
from collections.abc import Sequence

import ray
from ray.exceptions import RayError

from megatron_agent.errors import FleetError
from megatron_agent.generation import Completion, SamplingParams
from rollout.transport import CONNECT_TIMEOUT_S, RefusedError, ReplicaConnection, connect


class ReplicaDiedError(RuntimeError):
    """The replica of an episode is gone; the episode can be played again on another one."""


class FleetClient:
    """Generates on the fleet (a GenerateFn). Picklable before its first use; belongs to one event loop.

    A session stays on one replica, so that its prefix stays cached: the one that `place` named, else the one where this
    process has the fewest.
    """

    def __init__(self, names: Sequence[str], *, timeout_s: float) -> None:
        """`names` are the replicas' Ray actors; `timeout_s` is rollout.generate_timeout_s."""
        self._names = list(names)
        self._timeout_s = timeout_s
        self._connections: dict[str, asyncio.Task[ReplicaConnection]] = {}
        self._replica_of: dict[str, str] = {}
        self._sessions = dict.fromkeys(names, 0)

    async def __call__(self, prompt_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Completion:
        """Raises ReplicaDiedError where the replica is gone, FleetError after rollout.generate_timeout_s."""
        name = self._replica_of.get(session_id) or self._assign(session_id)
        connection = await self._connection(name)
        try:
            return await connection.ask(prompt_ids, params, timeout_s=self._timeout_s)
        except ConnectionError as error:
            raise ReplicaDiedError(f"{name} died: {error}") from error
        except RefusedError as error:
            raise FleetError(f"{name} failed: {error}; see its log in the run folder") from error
        except TimeoutError as error:
            raise FleetError(
                f"{name} gave no completion within rollout.generate_timeout_s={self._timeout_s:g}; "
                "raise it, or lower agent.max_response_tokens or rollout.max_concurrent_episodes"
            ) from error

    async def _connection(self, name: str) -> ReplicaConnection:
        task = self._connections.get(name)
        if task is None or (task.done() and not _is_usable(task)):
            task = self._connections[name] = asyncio.get_running_loop().create_task(_connect(name))
        # Shielded: an episode that runs out of time must not take the connection from the others.
        return task.result() if task.done() else await asyncio.shield(task)

    def place(self, session_id: str, replica: int) -> None:
        """Serve the session on this replica, by its number."""
        self._assign(session_id, self._names[replica])

    def forget(self, session_id: str) -> None:
        """The session is over."""
        if (name := self._replica_of.pop(session_id, None)) is not None:
            self._sessions[name] -= 1

    def _assign(self, session_id: str, name: str | None = None) -> str:
        self.forget(session_id)
        name = name or min(self._names, key=self._sessions.__getitem__)
        self._replica_of[session_id] = name
        self._sessions[name] += 1
        return name


def _is_usable(task: "asyncio.Task[ReplicaConnection]") -> bool:
    return not task.cancelled() and task.exception() is None and task.result().is_open


async def _connect(name: str) -> ReplicaConnection:
    """A new connection: a replica that was restarted has the old one's name and an endpoint of its own."""
    try:
        actor = await asyncio.to_thread(ray.get_actor, name)
        endpoint = await asyncio.wait_for(actor.endpoint.remote(), CONNECT_TIMEOUT_S)
        return await connect(name, endpoint)
    except ValueError as error:
        raise ReplicaDiedError(f"there is no {name} at the moment") from error
    except TimeoutError as error:
        raise ReplicaDiedError(f"{name} did not say within {CONNECT_TIMEOUT_S:g} s where it listens") from error
    except (RayError, ConnectionError) as error:  # one that is only starting fails to answer, too
        raise ReplicaDiedError(f"{name} died: {error}") from error
