"""Which replica plays which episode: groups stay together for their common prompt, and no replica idles meanwhile."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from megatron_agent.data import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """One episode to play."""

    row: Row
    group_id: str
    trajectory_id: str
    temperature: float
    attempt: int = 0
    replica: int | None = None
    """Number of the replica that serves it; None lets the runner's client choose."""


class ReplicaQueues:
    """The episodes that wait, one queue for each replica.

    A group waits at one replica, whose prefix cache then holds the group's prompt after the first member. The replica
    with the fewest episodes in flight is served next; where nothing waits for it, it takes the last that wait at the
    fullest queue. So each group's prompt is computed once, and once more for each replica that helps out.
    """

    def __init__(self, num_replicas: int) -> None:
        self._queues: list[deque[EpisodeRequest]] = [deque() for _ in range(num_replicas)]
        self._in_flight = [0] * num_replicas

    def __len__(self) -> int:
        """How many wait."""
        return sum(len(queue) for queue in self._queues)

    def add(self, requests: Iterable[EpisodeRequest]) -> None:
        """Let these wait; those of one group have to follow one another."""
        for _, members in groupby(requests, key=lambda request: request.group_id):
            min(self._queues, key=len).extend(members)

    def pop(self) -> tuple[EpisodeRequest, int]:
        """The next episode and the number of its replica, which counts as busy with it until `finished`."""
        number = min(range(len(self._queues)), key=lambda index: (self._in_flight[index], not self._queues[index]))
        own = self._queues[number]
        request = own.popleft() if own else max(self._queues, key=len).pop()
        self._in_flight[number] += 1
        return request, number

    def finished(self, number: int) -> None:
        """An episode that this replica was busy with is over."""
        self._in_flight[number] -= 1

    def clear(self) -> None:
        """Forget those that wait."""
        for queue in self._queues:
            queue.clear()
