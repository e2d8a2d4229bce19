"""Completions between runners and replicas over TCP: one connection for each pair, many requests in each frame.

    runner's event loop                                        replica's event loop
    ask() --> outbox --(once per loop turn)--> frame --> serve --> one task per request --> the engine
    waits on a future <-- answers <-- frame <--(once per loop turn)-- outbox <-- finished

An `ask` waits for its answer, its time-out, or the end of the connection, which is the end of the replica's process:
then all that wait get `ConnectionError`. A cancelled or timed-out `ask` tells the replica, which cancels the engine's
work. A Ray call in its place costs 1.4 ms of CPU for each request; a frame costs about as much as one small message.

A frame is its length (4 bytes, big endian) and a msgpack list of messages. The first frame of a connection is the
replica's secret, which only those who can reach its Ray actor know. Until it has come the replica keeps next to nothing
of what it is sent, and it does not wait for it long.
"""

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import numpy as np

from megatron_agent.errors import MegatronAgentError
from megatron_agent.generation import Completion, SamplingParams
from rollout.messages import DECODER, ENCODER, Answer, Ask, Cancel, Hello, Message, Refusal, check_params

CONNECT_TIMEOUT_S = 30.0
"""Until a connection stands; a replica that is alive accepts at once, and a runner says at once who it is."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""A machine that is switched off says no goodbye: about 30 s without a sign of life end the connection (s, s, times,
ms)."""
MAX_FRAME_BYTES = 1 << 30
MAX_HELLO_BYTES = 1 << 10
"""The largest frame of somebody unknown."""
_LENGTH = struct.Struct("!I")

GenerateRequest = Callable[[list[int], SamplingParams], Awaitable[Completion]]


class RefusedError(RuntimeError):
    """The replica answered that it cannot serve this request."""


class Endpoint(msgspec.Struct, frozen=True):
    """Where a replica listens, and what to say first."""

    host: str
    port: int
    secret: str


class _FrameProtocol(asyncio.Protocol):
    """Cuts the stream into frames, and sends what one turn of the event loop has collected as one."""

    max_frame_bytes = MAX_FRAME_BYTES
    """Whoever announces a longer one is no part of the run."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._outbox: list[msgspec.Raw] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._outbox.clear()

    def send(self, message: Message) -> None:
        """Send with whatever else this turn of the event loop sends; nothing where the connection has ended.

        Encodes it here, so that one that cannot be encoded raises at its sender and costs no other message.
        """
        if self._transport is None:
            return
        encoded = msgspec.Raw(ENCODER.encode(message))
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outbox.append(encoded)

    def flush(self) -> None:
        """Send what was collected so far as a frame of its own."""
        if self._transport is not None and self._outbox:
            frame = ENCODER.encode(self._outbox)
            self._outbox.clear()
            self._transport.write(_LENGTH.pack(len(frame)) + frame)

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            end = start + _LENGTH.size + length
            if length > self.max_frame_bytes:
                return self.abort()
            if len(self._received) < end:
                break
            try:
                messages = DECODER.decode(memoryview(self._received)[start + _LENGTH.size : end].tobytes())
            except msgspec.DecodeError:
                return self.abort()  # whoever sends this is no part of the run
            start = end
            for message in messages:
                self.received(message)
        del self._received[:start]

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()

    def received(self, message: Message) -> None:
        """A message has come."""
        raise NotImplementedError


class ReplicaConnection(_FrameProtocol):
    """A runner's side of the connection to one replica."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._next_number = 0
        self._lost: str | None = None
        """How the connection ended."""

    @property
    def is_open(self) -> bool:
        """False once the replica is gone."""
        return self._lost is None

    async def ask(self, prompt_ids: Any, params: SamplingParams, *, timeout_s: float) -> Completion:
        """One completion for ids [P].

        Raises ConnectionError where the replica is gone, TimeoutError, RefusedError where it could not serve, and
        TypeError where a parameter is not of its type.
        """
        if self._lost is not None:
            raise ConnectionError(self._lost)  # a new one: each raise of an exception adds to its traceback
        check_params(params)
        number = self._next_number = self._next_number + 1
        message = Ask(
            number=number,
            prompt_ids=np.asarray(prompt_ids, dtype="<i4").tobytes(),
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
        )
        loop = asyncio.get_running_loop()
        future = self._waiting[number] = loop.create_future()
        alarm = loop.call_later(timeout_s, _time_out, future)
        try:
            self.send(message)
            answer = await future
        except (asyncio.CancelledError, TimeoutError):
            self.send(Cancel(number))
            raise
        finally:
            alarm.cancel()
            self._waiting.pop(number, None)
        return Completion(
            token_ids=np.frombuffer(answer.token_ids, dtype="<i4").tolist(),
            logprobs=np.frombuffer(answer.logprobs, dtype="<f4").tolist(),
            finish_reason=answer.finish_reason,
            policy_version=answer.policy_version,
            num_cached_tokens=answer.num_cached_tokens,
            cache_block_tokens=answer.cache_block_tokens,
        )

    def received(self, message: Message) -> None:
        future = self._waiting.get(getattr(message, "number", 0))
        if future is None or future.done():  # cancelled meanwhile
            return
        if isinstance(message, Answer):
            future.set_result(message)
        elif isinstance(message, Refusal):
            future.set_exception(RefusedError(message.text))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost = f"the connection to {self._name} ended{f': {exc}' if exc else ''}"
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError(self._lost))


class ReplicaServer:
    """A replica's side: serves each connection's requests with one function, `generate(prompt_ids, params)`.

    A MegatronAgentError or any other exception of `generate` is sent to who asked, and to nobody else.
    """

    def __init__(self, generate: GenerateRequest) -> None:
        self._generate = generate
        self._secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._endpoint: Endpoint | None = None

    async def start(self, host: str) -> None:
        """Listen at a free port of `host`, an address of this machine that the runners reach."""
        listening = _new_socket(host)
        listening.bind((host, 0))
        self._endpoint = Endpoint(host, listening.getsockname()[1], self._secret)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Served(self._generate, self._secret), sock=listening, backlog=1024
        )

    @property
    def endpoint(self) -> Endpoint:
        """Where runners connect."""
        assert self._endpoint is not None, "the server has not started"
        return self._endpoint

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()


class _Served(_FrameProtocol):
    """The replica's side of one connection."""

    def __init__(self, generate: GenerateRequest, secret: str) -> None:
        super().__init__()
        self._generate = generate
        self._secret = secret
        self._is_known = False
        self._deadline: asyncio.TimerHandle | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.max_frame_bytes = MAX_HELLO_BYTES

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._deadline = asyncio.get_running_loop().call_later(CONNECT_TIMEOUT_S, self.abort)

    def received(self, message: Message) -> None:
        if not self._is_known:
            if isinstance(message, Hello) and hmac.compare_digest(message.secret.encode(), self._secret.encode()):
                self._is_known = True
                self.max_frame_bytes = MAX_FRAME_BYTES
                self._end_deadline()
            else:
                self.abort()
        elif isinstance(message, Ask):
            self._tasks[message.number] = asyncio.get_running_loop().create_task(self._serve(message))
        elif isinstance(message, Cancel) and (task := self._tasks.get(message.number)) is not None:
            task.cancel()

    async def _serve(self, ask: Ask) -> None:
        try:
            completion = await self._generate(
                np.frombuffer(ask.prompt_ids, dtype="<i4").tolist(),
                SamplingParams(
                    temperature=ask.temperature,
                    max_tokens=ask.max_tokens,
                    stop=ask.stop,
                    stop_token_ids=ask.stop_token_ids,
                ),
            )
            self.send(
                Answer(
                    number=ask.number,
                    token_ids=np.array(completion.token_ids, dtype="<i4").tobytes(),
                    logprobs=np.array(completion.logprobs, dtype="<f4").tobytes(),
                    finish_reason=completion.finish_reason,
                    policy_version=completion.policy_version,
                    num_cached_tokens=completion.num_cached_tokens,
                    cache_block_tokens=completion.cache_block_tokens,
                )
            )
        except MegatronAgentError as error:
            self._refuse(ask, str(error))
        except Exception as error:  # the engine's answer to this request, for example a prompt that is too long
            self._refuse(ask, f"{type(error).__name__}: {error}")
        finally:
            self._tasks.pop(ask.number, None)

    def _refuse(self, ask: Ask, text: str) -> None:
        # Half of a surrogate pair, as in the name of a file that is not UTF-8, has no encoding.
        self.send(Refusal(ask.number, text.encode("utf-8", "replace").decode()))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_deadline()
        for task in list(self._tasks.values()):  # the runner is gone: nobody reads these
            task.cancel()

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


async def connect(name: str, endpoint: Endpoint) -> ReplicaConnection:
    """A connection to the replica `name`; raises ConnectionError where nobody answers within CONNECT_TIMEOUT_S."""
    loop = asyncio.get_running_loop()
    own = _new_socket(endpoint.host)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await loop.sock_connect(own, (endpoint.host, endpoint.port))
            _, connection = await loop.create_connection(lambda: ReplicaConnection(name), sock=own)
    except OSError as error:  # TimeoutError is one too
        own.close()
        raise ConnectionError(
            f"{name} does not answer at {endpoint.host}:{endpoint.port} ({error or 'time-out'}); "
            "the machines of a run have to reach each other at all ports"
        ) from error
    except BaseException:  # cancelled
        own.close()
        raise
    connection.send(Hello(endpoint.secret))
    connection.flush()  # what follows may be longer than a frame of somebody unknown
    return connection


def _time_out(future: "asyncio.Future[Answer]") -> None:
    if not future.done():
        future.set_exception(TimeoutError())


def _new_socket(host: str) -> socket.socket:
    """A TCP socket for this address; the connections that a listening one accepts inherit its options."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        with contextlib.suppress(AttributeError, OSError):  # macOS names some of them otherwise
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
