"""Blocking user code beside the event loop: one thread per owner, and nothing waits for a call that hangs."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from megatron_agent.worker_thread import WorkerThread, run_in_thread


def test_calls_of_one_owner_run_in_one_thread_and_others_in_another():
    async def run():
        one, other = WorkerThread(), WorkerThread()
        threads = [await one.submit(threading.get_ident) for _ in range(3)]
        return threads, await other.submit(threading.get_ident)

    threads, other = asyncio.run(run())
    assert len(set(threads)) == 1
    assert other not in {*threads, threading.get_ident()}


def test_results_and_errors_come_back():
    async def run():
        thread = WorkerThread()
        assert await thread.submit(divmod, 7, 2) == (3, 1)
        with pytest.raises(KeyError):
            await thread.submit({}.__getitem__, "a")
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            await thread.submit(sys.exit, 3)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await thread.submit(next, iter(()))
        return await run_in_thread(lambda: "still here")

    assert asyncio.run(run()) == "still here"


def test_a_hanging_call_keeps_its_thread_and_the_next_gets_a_new_one():
    gate = threading.Event()

    async def run():
        thread = WorkerThread()
        first = await thread.submit(threading.get_ident)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(thread.submit(gate.wait), 0.05)
        second = await asyncio.wait_for(thread.submit(threading.get_ident), 5)
        gate.set()
        return first, second

    first, second = asyncio.run(run())
    assert first != second


def test_threads_end_with_their_owner():
    async def run():
        thread = WorkerThread()
        await thread.submit(int)
        thread.stop()
        await run_in_thread(int)

    before = threading.active_count()
    asyncio.run(run())
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_hanging_call_does_not_keep_the_process():
    program = (
        "import asyncio, time\n"
        "from megatron_agent.worker_thread import run_in_thread\n"
        "async def main():\n"
        "    try:\n"
        "        await asyncio.wait_for(run_in_thread(time.sleep, 3600), 0.05)\n"
        "    except TimeoutError:\n"
        "        print('went on')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "went on\n"
