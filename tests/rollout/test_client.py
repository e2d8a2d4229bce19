"""A runner's client against real servers: where requests go, and what a replica's end and return look like."""

import asyncio
import time

import pytest
from test_transport import HOST, Engine, until

import rollout.client
from megatron_agent.errors import FleetError
from megatron_agent.generation import SamplingParams
from rollout.client import FleetClient, ReplicaDiedError
from rollout.transport import ReplicaServer


class Fleet:
    """Replicas by name; `ray.get_actor` finds those that are up, and they say where they listen."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.servers: dict[str, ReplicaServer] = {}
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def start(self, name: str) -> None:
        self.engines[name] = Engine()
        self.servers[name] = ReplicaServer(self.engines[name])
        await self.servers[name].start(HOST)

    def get_actor(self, name: str):
        if name not in self.servers:
            raise ValueError(name)
        fleet = self

        class Endpoint:
            @staticmethod
            async def remote():
                fleet.num_asked += 1
                await fleet.may_answer.wait()
                return fleet.servers[name].endpoint

        class Actor:
            endpoint = Endpoint()

        return Actor()


def with_fleet(scenario, monkeypatch, *, replicas: int = 1, timeout_s: float = 10):
    """Run `scenario(fleet, client)` in an event loop."""

    async def run():
        fleet = Fleet()
        monkeypatch.setattr(rollout.client.ray, "get_actor", fleet.get_actor)
        names = [f"replica-{number}" for number in range(replicas)]
        for name in names:
            await fleet.start(name)
        client = FleetClient(names, timeout_s=timeout_s)
        try:
            await scenario(fleet, client)
        finally:
            await kill(client)
            for server in fleet.servers.values():
                server.close()

    asyncio.run(asyncio.wait_for(run(), 20))


async def kill(client: FleetClient) -> None:
    """End all connections, as the death of the replicas does."""
    for task in client._connections.values():
        if task.done() and not task.cancelled() and task.exception() is None:
            task.result().abort()
    await asyncio.sleep(0.02)


def ask(client: FleetClient, *prompt_ids: int, session: str = "episode"):
    return asyncio.ensure_future(client(list(prompt_ids), SamplingParams(), session_id=session))


def test_many_first_requests_make_one_connection(monkeypatch):
    async def scenario(fleet, client):
        await asyncio.gather(*(ask(client, 0, number, session=f"e{number}") for number in range(50)))
        assert fleet.num_asked == 1

    with_fleet(scenario, monkeypatch)


def test_a_replica_that_dies_gives_back_its_episodes_and_is_found_again(monkeypatch):
    async def scenario(fleet, client):
        waiting = [ask(client, -3, number, session=f"e{number}") for number in range(20)]
        await until(lambda: fleet.engines["replica-0"].running == 20)
        fleet.servers.pop("replica-0").close()
        await kill(client)
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, ReplicaDiedError)
        with pytest.raises(ReplicaDiedError, match="there is no replica-0"):
            await ask(client, 0, 1)
        await fleet.start("replica-0")  # at another port, with another secret
        assert (await ask(client, 0, 1)).token_ids == [1, 0]

    with_fleet(scenario, monkeypatch)


def test_a_replica_whose_port_is_closed_has_died(monkeypatch):
    async def scenario(fleet, client):
        fleet.servers["replica-0"].close()
        with pytest.raises(ReplicaDiedError, match="does not answer"):
            await ask(client, 0, 1)

    with_fleet(scenario, monkeypatch)


def test_generate_timeout_s(monkeypatch):
    async def scenario(fleet, client):
        started = time.monotonic()
        with pytest.raises(FleetError, match=r"replica-0 gave no completion within rollout.generate_timeout_s=0\.2"):
            await ask(client, -3, 1)
        assert time.monotonic() - started < 3

    with_fleet(scenario, monkeypatch, timeout_s=0.2)


def test_a_refusal_ends_the_run(monkeypatch):
    async def scenario(fleet, client):
        with pytest.raises(FleetError, match="replica-0 failed: no weights yet; see its log"):
            await ask(client, -1)

    with_fleet(scenario, monkeypatch)


def test_an_episode_that_gives_up_leaves_the_connection_to_the_others(monkeypatch):
    async def scenario(fleet, client):
        fleet.may_answer.clear()
        impatient, patient = ask(client, 0, 1, session="a"), ask(client, 0, 2, session="b")
        await until(lambda: fleet.num_asked == 1)
        impatient.cancel()
        await asyncio.sleep(0.02)
        fleet.may_answer.set()
        assert (await patient).token_ids == [2, 0]
        assert impatient.cancelled()

    with_fleet(scenario, monkeypatch)


def test_sessions_stay_where_they_were_placed_or_go_where_the_fewest_are(monkeypatch):
    async def scenario(fleet, client):
        client.place("a", 2)
        for session in ("a", "b", "c", "a", "b"):
            await ask(client, 0, 1, session=session)
        assert [len(fleet.engines[f"replica-{number}"].params) for number in range(3)] == [2, 1, 2]
        client.forget("b")
        client.forget("unknown")
        await ask(client, 0, 1, session="d")
        assert len(fleet.engines["replica-0"].params) == 3

    with_fleet(scenario, monkeypatch, replicas=3)
