"""Who plays what: groups stay together, and no replica has more than another while episodes wait."""

from collections import Counter

import pytest
from scripted_model import make_row

from rollout.dispatch import EpisodeRequest, ReplicaQueues


def requests(groups: int, size: int) -> list[EpisodeRequest]:
    row = make_row()
    return [
        EpisodeRequest(row=row, group_id=f"g{group}", trajectory_id=f"g{group}-{member}", temperature=1.0)
        for group in range(groups)
        for member in range(size)
    ]


def replicas_of_groups(popped: list[tuple[EpisodeRequest, int]]) -> dict[str, set[int]]:
    places: dict[str, set[int]] = {}
    for request, replica in popped:
        places.setdefault(request.group_id, set()).add(replica)
    return places


@pytest.mark.parametrize(("groups", "replicas"), [(4, 1), (4, 2), (8, 4), (256, 64)])
def test_groups_stay_together_and_replicas_get_equal_shares(groups, replicas):
    queues = ReplicaQueues(replicas)
    queues.add(requests(groups, 8))
    popped = [queues.pop() for _ in range(len(queues))]
    assert not queues
    assert all(len(places) == 1 for places in replicas_of_groups(popped).values())
    assert set(Counter(replica for _, replica in popped).values()) == {groups * 8 // replicas}


def test_a_group_too_many_is_shared():
    """Three groups of 8 for two replicas: 12 episodes each, so only the third group's prompt is computed twice."""
    queues = ReplicaQueues(2)
    queues.add(requests(3, 8))
    popped = [queues.pop() for _ in range(24)]
    assert Counter(replica for _, replica in popped) == {0: 12, 1: 12}
    assert sorted(len(places) for places in replicas_of_groups(popped).values()) == [1, 1, 2]


def test_one_group_uses_all_replicas():
    queues = ReplicaQueues(4)
    queues.add(requests(1, 8))
    assert Counter(queues.pop()[1] for _ in range(8)) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_a_slow_replica_gets_less():
    """Replica 1 finishes nothing; what waited for it goes elsewhere once that has nothing of its own."""
    queues = ReplicaQueues(2)
    queues.add(requests(4, 4))
    for _ in range(4):
        queues.pop()
    for _ in range(12):
        queues.finished(0)
        _, replica = queues.pop()
        assert replica == 0
    assert not queues


def test_a_group_follows_its_first_member_in_time():
    queues = ReplicaQueues(1)
    queues.add(requests(3, 2))
    assert [queues.pop()[0].trajectory_id for _ in range(6)] == ["g0-0", "g0-1", "g1-0", "g1-1", "g2-0", "g2-1"]
