"""A server that does nothing but stream: SGLang's `/generate` events, one write each, as fast as the client takes them.

`python benchmarks/blast.py PORT`. For the ceiling of a client: the simulated server keeps a rate and a token clock,
and would itself be what is measured. Answers to one output length are made once, so that a write costs nothing else.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import cache

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
WORDS = (" bafex", " dogix", " lumax", " tirox", " vezax")


@cache
def chunks(tokens: int) -> tuple[bytes, ...]:
    """The answer's HTTP chunks: one cumulative event a token, as SGLang 0.5.23 writes them, and the end."""
    made, text, ids = [], "", []
    for number in range(1, tokens + 1):
        text += WORDS[number % len(WORDS)]
        ids.append(300 + number % 200)
        meta = {
            "id": "0123456789abcdef0123456789abcdef",
            "finish_reason": None if number < tokens else {"type": "length", "length": tokens},
            "prompt_tokens": 32,
            "weight_version": "default",
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": number,
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "dp_rank": None,
        }
        event = json.dumps({"text": text, "output_ids": ids, "meta_info": meta}, separators=(",", ":")).encode()
        body = b"data: " + event + b"\n\n"
        made.append(b"%x\r\n%b\r\n" % (len(body), body))
    done = b"data: [DONE]\n\n"
    made.append(b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done))
    return tuple(made)


class Blast(asyncio.Protocol):
    """One connection. Streams take turns, an event each; one whose client is slow waits for it."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.data = b""
        self.left: list[bytes] = []
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.transport.set_write_buffer_limits(high=65536)

    def connection_lost(self, _error: Exception | None) -> None:
        self.left = []

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.turns.wake()

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, blank, body = self.data.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if not blank or len(body) < length:
            return
        self.data = body[length:]
        if head.startswith(b"POST /generate"):
            tokens = json.loads(body[:length])["sampling_params"]["max_new_tokens"]
            self.transport.write(HEAD)
            self.left = list(reversed(chunks(tokens)))
            self.turns.add(self)
        else:
            answer = b'{"data": [{"id": "blast"}], "version": "blast", "internal_states": [{}]}'
            self.transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(answer), answer)
            )


class Turns:
    """Gives every stream that can be written one event a round."""

    def __init__(self) -> None:
        self.streams: set[Blast] = set()
        self.busy = asyncio.Event()

    def add(self, stream: Blast) -> None:
        self.streams.add(stream)
        self.busy.set()

    def wake(self) -> None:
        self.busy.set()

    async def run(self) -> None:
        while True:
            await self.busy.wait()
            wrote = False
            for stream in list(self.streams):
                if not stream.left:
                    self.streams.discard(stream)
                elif not stream.paused:
                    stream.transport.write(stream.left.pop())
                    wrote = True
            if not wrote:
                self.busy.clear()
            await asyncio.sleep(0)


async def serve(port: int) -> None:
    turns = Turns()
    await asyncio.get_running_loop().create_server(lambda: Blast(turns), "127.0.0.1", port, backlog=1024)
    print("ready", flush=True)
    await turns.run()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
