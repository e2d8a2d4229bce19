"""Requests over a real socket: each answer goes to who asked, and an end of any kind reaches all that wait."""

import asyncio
import socket
import time

import msgspec
import numpy as np
import pytest

import rollout.transport
from megatron_agent.errors import FleetError
from megatron_agent.generation import Completion, SamplingParams
from rollout.transport import (
    KEEPALIVE,
    Endpoint,
    RefusedError,
    ReplicaConnection,
    ReplicaServer,
    _new_socket,
    connect,
)

HOST = "127.0.0.1"


class Engine:
    """Answers a prompt [n, ...] after n milliseconds with its ids reversed; negative n: see `__call__`."""

    def __init__(self) -> None:
        self.running = 0
        self.cancelled: list[int] = []
        self.params: list[SamplingParams] = []

    async def __call__(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        self.params.append(params)
        self.running += 1
        try:
            match prompt_ids[0]:
                case -1:
                    raise FleetError("no weights yet")
                case -2:
                    raise ValueError("prompt too long")
                case -4:
                    raise ValueError("no file named \udce9t\udce9")
                case -5:
                    return Completion(token_ids=[1], logprobs=[0.0], finish_reason="stop", policy_version=2**70)
                case -3:
                    await asyncio.sleep(3600)
                case delay_ms:
                    await asyncio.sleep(delay_ms / 1000)
        except asyncio.CancelledError:
            self.cancelled.append(prompt_ids[1])
            raise
        finally:
            self.running -= 1
        return Completion(
            token_ids=prompt_ids[::-1],
            logprobs=[-0.5 * place for place in range(len(prompt_ids))],
            finish_reason="stop",
            policy_version=7,
            num_cached_tokens=16,
            cache_block_tokens=16,
        )


def with_connection(scenario):
    """Run `scenario(engine, server, connection)` in an event loop."""

    async def run():
        engine = Engine()
        server = ReplicaServer(engine)
        await server.start(HOST)
        connection = await connect("replica-0", server.endpoint)
        try:
            await scenario(engine, server, connection)
        finally:
            connection.abort()
            server.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def ask(connection: ReplicaConnection, *prompt_ids: int, timeout_s: float = 10, **params):
    return asyncio.ensure_future(connection.ask(prompt_ids, SamplingParams(**params), timeout_s=timeout_s))


async def until(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_every_field_arrives():
    async def scenario(engine, server, connection):
        params = SamplingParams(temperature=0.7, max_tokens=9, stop=("\n", "ünd"), stop_token_ids=(5, 6))
        completion = await connection.ask([0, 151_000, 3], params, timeout_s=10)
        assert engine.params == [params]
        assert completion == Completion(
            token_ids=[3, 151_000, 0],
            logprobs=[0.0, -0.5, -1.0],
            finish_reason="stop",
            policy_version=7,
            num_cached_tokens=16,
            cache_block_tokens=16,
        )

    with_connection(scenario)


def test_answers_reach_who_asked_in_whatever_order_they_come():
    async def scenario(engine, server, connection):
        delays = [(37 * number) % 50 for number in range(300)]
        order: list[int] = []

        async def one(number: int) -> None:
            completion = await connection.ask([delays[number], number], SamplingParams(), timeout_s=10)
            assert completion.token_ids == [number, delays[number]]
            order.append(number)

        await asyncio.gather(*(one(number) for number in range(300)))
        assert sorted(order) == list(range(300))
        assert order != list(range(300)), "the slow ones held up the quick ones"

    with_connection(scenario)


def test_requests_of_one_turn_of_the_loop_share_a_frame():
    async def scenario(engine, server, connection):
        await ask(connection, 0, 1)
        writes: list[int] = []
        transport = connection._transport
        original = transport.write

        class Counting:
            def __getattr__(self, name):
                return getattr(transport, name)

            def write(self, data):
                writes.append(len(data))
                original(data)

        connection._transport = Counting()
        await asyncio.gather(*(ask(connection, 0, number) for number in range(64)))
        assert len(writes) == 1

    with_connection(scenario)


def test_a_prompt_of_many_pieces_arrives_whole():
    async def scenario(engine, server, connection):
        prompt = [0, *range(500_000)]
        completion = await connection.ask(prompt, SamplingParams(), timeout_s=10)
        assert completion.token_ids == prompt[::-1]

    with_connection(scenario)


def test_a_refusal_says_why_and_harms_nobody_else():
    async def scenario(engine, server, connection):
        good, no_weights, too_long = ask(connection, 20, 1), ask(connection, -1), ask(connection, -2)
        with pytest.raises(RefusedError, match=r"^no weights yet$"):
            await no_weights
        with pytest.raises(RefusedError, match=r"^ValueError: prompt too long$"):
            await too_long
        assert (await good).token_ids == [1, 20]

    with_connection(scenario)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": np.int64(5)},
        {"max_tokens": 5.5},
        {"max_tokens": 2**70},
        {"temperature": None},
        {"stop": ("\ud800",)},
        {"stop_token_ids": (7, "8")},
    ],
)
def test_a_parameter_that_cannot_be_sent_fails_its_own_request_only(wrong):
    async def scenario(engine, server, connection):
        before = ask(connection, 20, 1)
        with pytest.raises(TypeError, match=f"^SamplingParams.{next(iter(wrong))}=.* cannot be sent to a replica: "):
            await ask(connection, 0, 2, **wrong)
        assert (await before).token_ids == [1, 20]
        assert (await ask(connection, 0, 3)).token_ids == [3, 0]
        assert not connection._waiting
        assert len(engine.params) == 2

    with_connection(scenario)


def test_ids_that_are_none_fail_their_own_request_only():
    async def scenario(engine, server, connection):
        with pytest.raises(OverflowError):
            await ask(connection, 0, 2**40)
        assert (await ask(connection, 0, 3)).token_ids == [3, 0]
        assert not connection._waiting

    with_connection(scenario)


def test_an_answer_that_cannot_be_sent_is_refused_and_harms_nobody_else():
    async def scenario(engine, server, connection):
        good, not_utf8, not_int64 = ask(connection, 20, 1), ask(connection, -4), ask(connection, -5)
        with pytest.raises(RefusedError, match=r"^ValueError: no file named \?t\?$"):
            await not_utf8
        with pytest.raises(RefusedError, match=r"^OverflowError: "):
            await not_int64
        assert (await good).token_ids == [1, 20]
        assert (await ask(connection, 0, 3)).token_ids == [3, 0]

    with_connection(scenario)


def test_a_time_out_ends_the_wait_and_the_engines_work():
    async def scenario(engine, server, connection):
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            await ask(connection, -3, 11, timeout_s=0.2)
        assert 0.2 <= time.monotonic() - started < 2
        await until(lambda: engine.cancelled == [11])
        assert (await ask(connection, 0, 1)).token_ids == [1, 0]
        assert not connection._waiting

    with_connection(scenario)


def test_a_cancelled_episode_ends_the_engines_work():
    async def scenario(engine, server, connection):
        hanging, other = ask(connection, -3, 12), ask(connection, 100, 1)
        await until(lambda: engine.running == 2)
        hanging.cancel()
        await until(lambda: engine.cancelled == [12])
        assert (await other).token_ids == [1, 100]

    with_connection(scenario)


def test_the_end_of_the_replica_reaches_all_that_wait():
    async def scenario(engine, server, connection):
        waiting = [ask(connection, -3, number) for number in range(50)]
        await until(lambda: engine.running == 50)
        connection._transport.abort()  # as the kernel does with the sockets of a process that was killed
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, ConnectionError)
            assert "replica-0" in str(error)
        assert not connection.is_open
        errors = await asyncio.gather(*(ask(connection, 0, 1) for _ in range(2)), return_exceptions=True)
        assert [type(error) for error in errors] == [ConnectionError] * 2
        assert errors[0] is not errors[1], "the traceback of one that is raised again and again grows"
        await until(lambda: engine.running == 0)  # the engine does not work on for a runner that is gone

    with_connection(scenario)


def test_nobody_listens():
    async def scenario(engine, server, connection):
        endpoint = server.endpoint
        server.close()
        with pytest.raises(ConnectionError, match=f"replica-0 does not answer at {HOST}:{endpoint.port}"):
            await connect("replica-0", endpoint)

    with_connection(scenario)


def test_a_cancelled_connect_keeps_no_socket(monkeypatch):
    made: list[socket.socket] = []
    new = rollout.transport._new_socket
    monkeypatch.setattr(rollout.transport, "_new_socket", lambda host: made.append(new(host)) or made[-1])

    async def scenario(engine, server, connection):
        with socket.socket() as full:  # takes one connection and accepts none: the next one waits
            full.bind((HOST, 0))
            full.listen(0)
            host, port = full.getsockname()
            with socket.create_connection((host, port)):
                connecting = asyncio.ensure_future(connect("replica-0", Endpoint(host, port, "secret")))
                await until(lambda: len(made) == 3)
                await asyncio.sleep(0.05)
                connecting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await connecting
                assert made[-1].fileno() == -1

    with_connection(scenario)


@pytest.mark.parametrize("first", ["secret: guess", "secret: gueß", "no secret", "no frame"])
def test_strangers_are_not_served(first, caplog):
    async def scenario(engine, server, connection):
        endpoint: Endpoint = server.endpoint
        if first.startswith("secret: "):
            guess = first.removeprefix("secret: ")
            stranger = await connect("replica-0", msgspec.structs.replace(endpoint, secret=guess))
            with pytest.raises(ConnectionError):
                await ask(stranger, 0, 1)
        else:
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            body = msgspec.msgpack.encode([["ask", 1, b"", 1.0, 1, [], []]])
            writer.write(len(body).to_bytes(4, "big") + body if first == "no secret" else b"\0\0\0\2GET / HTTP/1.1")
            assert await reader.read() == b""
            writer.close()
        assert engine.params == []
        assert (await ask(connection, 0, 1)).token_ids == [1, 0]

    with_connection(scenario)
    assert not caplog.records, "the replica's log is for its own failures"


def test_a_stranger_cannot_fill_the_replicas_memory():
    async def scenario(engine, server, connection):
        reader, writer = await asyncio.open_connection(server.endpoint.host, server.endpoint.port)
        writer.write((1 << 20).to_bytes(4, "big") + b"x" * 100)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()

    with_connection(scenario)


@pytest.mark.parametrize("said", [b"", b"\0\0\0\x20half"])
def test_a_stranger_that_says_nothing_is_not_kept(said, monkeypatch):
    monkeypatch.setattr(rollout.transport, "CONNECT_TIMEOUT_S", 0.2)

    async def scenario(engine, server, connection):
        reader, writer = await asyncio.open_connection(server.endpoint.host, server.endpoint.port)
        writer.write(said)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert (await ask(connection, 0, 1)).token_ids == [1, 0], "the deadline is for strangers only"

    with_connection(scenario)


def test_the_first_request_may_be_long():
    async def scenario(engine, server, connection):
        new = await connect("replica-0", server.endpoint)
        assert len((await ask(new, 0, *range(10_000))).token_ids) == 10_001
        direct = await connect("replica-0", server.endpoint)
        completion = await direct.ask([0, *range(10_000)], SamplingParams(), timeout_s=10)  # in the same turn
        assert len(completion.token_ids) == 10_001
        for made in (new, direct):
            made.abort()

    with_connection(scenario)


def test_sockets_notice_a_machine_that_is_gone():
    with _new_socket(HOST) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == KEEPALIVE["TCP_KEEPIDLE"]
