"""Events of several requests reach the readers of an event loop together."""

import asyncio

from quantflow.runtime.batching.request import BatchRequest, FinishReason, TokenEvent
from quantflow.runtime.batching.stream import Readers, Stream


def stream() -> Stream:
    return Stream(BatchRequest(input_ids=(0,), max_new_tokens=2), on_cancel=lambda _: None)


def test_readers_of_one_loop_are_woken_by_one_call_and_not_before(monkeypatch):
    async def run():
        loop, readers, streams, got, calls = (
            asyncio.get_running_loop(),
            Readers(),
            [stream() for _ in range(5)],
            [],
            [],
        )
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *given: (calls.append(given), call(*given))
        )

        async def read(one):
            async for event in one:
                got.append(event.id)

        tasks = [asyncio.create_task(read(one)) for one in streams]
        await asyncio.sleep(0)  # all wait
        for one in streams:
            one.put(TokenEvent(index=0, id=7, logprob=0.0), readers)
        await asyncio.sleep(0.01)
        assert (got, len(calls)) == ([], 0)
        readers.wake()
        await asyncio.sleep(0.01)
        assert (got, len(calls)) == ([7] * 5, 1)
        for one in streams:
            one.put(TokenEvent(index=1, id=8, logprob=0.0, finish=FinishReason.LENGTH), readers)
        readers.wake()
        await asyncio.gather(*tasks)
        assert (got[5:], len(calls)) == ([8] * 5, 2)

    asyncio.run(run())


def test_what_is_put_before_anybody_waits_is_read_without_being_woken():
    async def run():
        one, readers = stream(), Readers()
        one.put(TokenEvent(index=0, id=7, logprob=0.0, finish=FinishReason.LENGTH), readers)
        return [event.id async for event in one]

    assert asyncio.run(run()) == [7]


def test_a_reader_whose_loop_was_closed_is_forgotten():
    one, readers = stream(), Readers()

    async def leave():
        task = asyncio.create_task(anext(aiter(one)))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    one.put(TokenEvent(index=0, id=7, logprob=0.0, finish=FinishReason.LENGTH), readers)
    readers.wake()
    assert [event.id for event in one] == [7]
