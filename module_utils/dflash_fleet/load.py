"""Steady load on an OpenAI-compatible server: N requests at a time, streamed, and what became of each.

    python3 -m dflash_fleet.load --url http://router:30000 --model m --concurrency 32 --seconds 60

One JSON object on standard output; nothing but Python's standard library. A request is `ok` when its stream had its
end, `cut` when the answer began and broke off, `failed` otherwise. Tokens are the server's own count (`usage`): with
speculation a chunk holds several. Each request has a connection of its own, so that a balancer places it anew and no
request fails on an idle connection that the other side has just closed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import ssl
import sys
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

SCHEMA = 1
# `generate` is SGLang's own: its events carry the count of tokens so far, and the last one the accept length.
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}
# In each event of `generate`, and of others where a server counts as it goes. Within a text the quotes are escaped.
COUNTED = re.compile(rb'"completion_tokens": ?(\d+)')
# Different reasons of failures that a result keeps, with their counts.
REASONS = 20


class Expired(Exception):
    """A request had no end in its time. Not TimeoutError: the system's own means a connection that nobody took."""


class Broken(Exception):
    """The answer is not what HTTP or the API promise; the message says what."""


def chunked(buffer: bytearray) -> tuple[bytes, bool]:
    """Take the whole chunks of a chunked body from the front of `buffer`: their content, and whether the body ended."""
    content = bytearray()
    while True:
        end = buffer.find(b"\r\n")
        if end < 0:
            return bytes(content), False
        try:
            size = int(bytes(buffer[:end]).split(b";", 1)[0], 16)
        except ValueError:
            raise Broken("broken chunk header") from None
        if size == 0:
            return bytes(content), True
        if len(buffer) < end + 2 + size + 2:
            return bytes(content), False
        content += buffer[end + 2 : end + 2 + size]
        del buffer[: end + 2 + size + 2]


def find(value: Any, key: str) -> Any:
    """The first value under `key` anywhere in a JSON document; servers differ in where they put such figures."""
    if isinstance(value, dict):
        if value.get(key) is not None:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            found = find(item, key)
            if found is not None:
                return found
    return None


def says_something(event: dict[str, Any]) -> bool:
    """Whether an event carries generated text; a chat's first one only names the role."""
    if event.get("text"):
        return True
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            return True
    return False


class Stream:
    """The server-sent events of one answer. Only the events that matter are parsed as JSON."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._last: list[bytes] = []
        self.first: float | None = None
        self.last: float | None = None
        self.gaps: list[float] = []  # one a token where the server counts as it goes, else one an event
        self._counted = 0
        self.done = False

    def feed(self, content: bytes, now: float) -> None:
        self._buffer += content.replace(b"\r\n", b"\n")
        while (end := self._buffer.find(b"\n\n")) >= 0:
            event = bytes(self._buffer[:end])
            del self._buffer[: end + 2]
            if not event.startswith(b"data:"):
                continue
            data = event[5:].strip()
            if data == b"[DONE]":
                self.done = True
                continue
            if data.startswith(b'{"error"'):
                raise Broken(f"error in the stream: {data[:200].decode(errors='replace')}")
            self._last = [*self._last[-2:], data]
            counts = COUNTED.findall(data)
            counted = int(counts[-1]) if counts else 0
            if self.first is None:
                if says_something(json.loads(data)):
                    self.first = self.last = now
                    self._counted = counted
            elif b'"choices":[]' not in data and b'"choices": []' not in data:
                self._token(now, counted)

    def _token(self, now: float, counted: int) -> None:
        """An event with text: the time since the one before, shared by its tokens."""
        new = counted - self._counted if counted else 1
        if new < 1:
            return  # the end, said without another token
        self._counted = counted
        gap = now - (self.last or now)
        self.gaps += [gap / new] * new
        self.last = now

    def figures(self) -> dict[str, Any]:
        """What the last events say of the whole request."""
        found: dict[str, Any] = {"tokens": None, "prompt_tokens": None, "accept_length": None, "finish": None}
        for data in self._last:
            event = json.loads(data)
            usage = event.get("usage") or event.get("meta_info") or {}
            found["tokens"] = usage.get("completion_tokens", found["tokens"])
            found["prompt_tokens"] = usage.get("prompt_tokens", found["prompt_tokens"])
            finish = find(event, "finish_reason") or found["finish"]
            found["finish"] = finish.get("type") if isinstance(finish, dict) else finish
            found["accept_length"] = find(event, "spec_accept_length") or found["accept_length"]
        return found


class Load:
    """The settings of one run, and its requests."""

    def __init__(
        self,
        url: str,
        model: str,
        prompts: list[str],
        endpoint: str = "completions",
        concurrency: int = 8,
        seconds: float | None = None,
        requests: int | None = None,
        max_tokens: int = 64,
        ignore_eos: bool = False,
        temperature: float | None = None,
        timeout: float = 600,
        key: str = "",
        extra: dict[str, Any] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an address: {url}")
        self.host, self.secure = parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self.secure else 80)
        self.path = parts.path.rstrip("/") + PATHS[endpoint]
        self.tls = (tls or ssl.create_default_context()) if self.secure else None
        self.model, self.prompts, self.endpoint = model, prompts, endpoint
        self.concurrency, self.seconds, self.requests = concurrency, seconds, requests
        self.max_tokens, self.timeout, self.key, self.extra = max_tokens, timeout, key, extra or {}
        # Fixed lengths go on after the model's own end; neither is said where it is the server's default.
        self.sampling: dict[str, Any] = {**({"ignore_eos": True} if ignore_eos else {})}
        if temperature is not None:
            self.sampling["temperature"] = temperature
        self.started_count = 0
        self.results: list[dict[str, Any]] = []
        self.gaps: list[float] = []
        self.stopping = False

    def message(self, number: int) -> bytes:
        prompt = self.prompts[number % len(self.prompts)]
        body: dict[str, Any] = {"stream": True}
        if self.endpoint == "generate":
            body.update(text=prompt, sampling_params={"max_new_tokens": self.max_tokens, **self.sampling})
        else:
            body.update(model=self.model, max_tokens=self.max_tokens, **self.sampling)
            body["stream_options"] = {"include_usage": True}
            chat = self.endpoint == "chat"
            body.update({"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt})
        body.update(self.extra)
        content = json.dumps(body).encode()
        name = f"[{self.host}]" if ":" in self.host else self.host
        head = [f"POST {self.path} HTTP/1.1", f"Host: {name}:{self.port}", "Content-Type: application/json"]
        head += [f"Content-Length: {len(content)}", "Accept: text/event-stream", "Connection: close"]
        if self.key:
            head.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join(head).encode() + b"\r\n\r\n" + content

    async def request(self, number: int) -> dict[str, Any]:
        """One request; its record."""
        stream = Stream()
        begun = time.perf_counter()
        record: dict[str, Any] = {"outcome": "failed", "reason": None}
        answered = False
        writer = None
        try:
            async with Timeout(self.timeout):
                reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.tls)
                writer.write(self.message(number))
                head = await reader.readuntil(b"\r\n\r\n")
                status = int(head.split(b" ", 2)[1])
                if status != 200:
                    text = (await reader.read(300)).decode(errors="replace")
                    raise Broken(f"HTTP {status}: {' '.join(text.split())[:160]}")
                answered = True
                await self._read(reader, stream, b"transfer-encoding: chunked" in head.lower())
            record.update(stream.figures())
            if stream.first is None and not record["tokens"]:
                raise Broken("an answer without a token")
            record["outcome"] = "ok"
        except Expired:
            record["reason"] = f"no end after {self.timeout:g} s"
        except asyncio.IncompleteReadError:
            record["reason"] = "closed before the answer"
        except (Broken, OSError, ValueError, IndexError, asyncio.LimitOverrunError) as problem:
            record["reason"] = str(problem) or type(problem).__name__
        finally:
            if writer is not None:
                writer.close()
        if record["outcome"] != "ok" and answered:
            record["outcome"] = "cut"
        ended = time.perf_counter()
        record.update(begun=begun, e2e=ended - begun, ttft=None if stream.first is None else stream.first - begun)
        if record["outcome"] == "ok":
            self.gaps += stream.gaps
            if stream.first is not None and stream.last is not None and (record["tokens"] or 0) > 1:
                record["tpot"] = (stream.last - stream.first) / (record["tokens"] - 1)
        return record

    @staticmethod
    async def _read(reader: asyncio.StreamReader, stream: Stream, is_chunked: bool) -> None:
        buffer = bytearray()
        while True:
            piece = await reader.read(65536)
            now = time.perf_counter()
            if not piece:
                if not stream.done:
                    raise Broken("the stream broke off before its end")
                return
            ended = False
            if is_chunked:
                buffer += piece
                piece, ended = chunked(buffer)
            stream.feed(piece, now)
            if ended:
                if not stream.done:
                    raise Broken("the stream ended without [DONE]")
                return

    async def worker(self, deadline: float | None) -> None:
        while not self.stopping and (deadline is None or time.perf_counter() < deadline):
            if self.requests is not None and self.started_count >= self.requests:
                return
            number = self.started_count
            self.started_count += 1
            record = await self.request(number)
            self.results.append(record)
            if record["outcome"] == "failed":
                await asyncio.sleep(0.1)  # a server that refuses at once must not be hammered

    async def run(self) -> dict[str, Any]:
        """Requests that are under way when the time is up are finished, and counted."""
        begun, cpu = time.perf_counter(), time.process_time()
        deadline = None if self.seconds is None else begun + self.seconds
        await asyncio.gather(*(self.worker(deadline) for _ in range(self.concurrency)))
        return self.summary(time.perf_counter() - begun, time.process_time() - cpu)

    def summary(self, duration: float, cpu: float) -> dict[str, Any]:
        ok = [record for record in self.results if record["outcome"] == "ok"]
        outcomes = Counter(record["outcome"] for record in self.results)
        tokens = sum(record["tokens"] or 0 for record in ok)
        accepts = [float(record["accept_length"]) for record in ok if record["accept_length"] is not None]
        rates = [record["tokens"] / record["e2e"] for record in ok if record["tokens"] and record["e2e"]]
        reasons = Counter(record["reason"] for record in self.results if record["reason"])
        return {
            "schema": SCHEMA,
            "endpoint": self.endpoint,
            "model": self.model,
            "concurrency": self.concurrency,
            "max_tokens": self.max_tokens,
            "duration": round(duration, 3),
            "requests": len(self.results),
            "ok": outcomes["ok"],
            "failed": outcomes["failed"],
            "cut": outcomes["cut"],
            # Answers that said no usage: their tokens are missing in the sums, which must be known.
            "without_usage": sum(1 for record in ok if record["tokens"] is None),
            "output_tokens": tokens,
            "input_tokens": sum(record["prompt_tokens"] or 0 for record in ok),
            "request_throughput": round(len(ok) / duration, 3) if duration else 0.0,
            "output_throughput": round(tokens / duration, 3) if duration else 0.0,
            "ttft_ms": percentiles([record["ttft"] for record in ok if record["ttft"] is not None]),
            "tpot_ms": percentiles([record["tpot"] for record in ok if "tpot" in record]),
            "itl_ms": percentiles(self.gaps),
            "e2e_ms": percentiles([record["e2e"] for record in ok]),
            "request_tps": spread(rates),
            "accept_length": round(sum(accepts) / len(accepts), 4) if accepts else None,
            "accept_lengths": spread(accepts),
            "reasons": dict(reasons.most_common(REASONS)),
            "cpu_seconds": round(cpu, 3),
        }


class Timeout:
    """asyncio.timeout for Python 3.9 and 3.10: cancels the surrounding task, and says Expired."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.expired = seconds, False

    async def __aenter__(self) -> Timeout:
        task = asyncio.current_task()
        assert task is not None
        self._handle = asyncio.get_running_loop().call_later(self.seconds, self._expire, task)
        return self

    def _expire(self, task: asyncio.Task[Any]) -> None:
        self.expired = True
        task.cancel()

    async def __aexit__(self, kind: Any, value: Any, trace: Any) -> None:
        self._handle.cancel()
        if self.expired and kind is asyncio.CancelledError:
            raise Expired


def nearest_rank(ordered: list[float], percent: int) -> float:
    """The smallest value that so many percent do not exceed."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def percentiles(seconds: list[float]) -> dict[str, float] | None:
    """Mean and nearest-rank percentiles in milliseconds; nothing from nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {"mean": sum(ordered) / len(ordered)}
    found.update({f"p{percent}": nearest_rank(ordered, percent) for percent in (50, 90, 99)})
    found["max"] = ordered[-1]
    return {name: round(value * 1000, 3) for name, value in found.items()}


def spread(values: list[float]) -> dict[str, float] | None:
    """Of figures of which little is bad: mean, median, and the lower end; nothing from nothing."""
    if not values:
        return None
    ordered = sorted(values)
    found = {"mean": sum(ordered) / len(ordered), "min": ordered[0]}
    found.update({f"p{percent}": nearest_rank(ordered, percent) for percent in (10, 50, 90)})
    return {name: round(value, 4) for name, value in found.items()}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m dflash_fleet.load", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--url", required=True, help="http://HOST:PORT or https://HOST:PORT")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--endpoint", choices=sorted(PATHS), default="completions")
    parser.add_argument("--concurrency", type=int, default=8)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--seconds", type=float, help="start requests for so long, then let them end")
    length.add_argument("--requests", type=int, help="make so many requests")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--ignore-eos", action="store_true", help="exactly --max-tokens tokens in each answer")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--prompts", help="file with a prompt on each line")
    parser.add_argument("--timeout", type=float, default=600, help="seconds until a request counts as lost")
    parser.add_argument("--key-file", help="file with the API key; DFLASH_FLEET_API_KEY is asked without one")
    parser.add_argument("--ca-file", help="certificate authority of an https address")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON object added to each request's body")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    key = os.environ.get("DFLASH_FLEET_API_KEY", "")
    if options.key_file:
        with open(options.key_file, encoding="utf-8") as file:
            key = file.read().strip()
    prompts = ["Write a short story about a lighthouse.", "Explain how a heat pump works.", "List ten uses of copper."]
    if options.prompts:
        with open(options.prompts, encoding="utf-8") as file:
            prompts = [line.rstrip("\n") for line in file if line.strip()] or prompts
    load = Load(
        options.url,
        options.model,
        prompts,
        endpoint=options.endpoint,
        concurrency=options.concurrency,
        seconds=options.seconds,
        requests=options.requests,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        timeout=options.timeout,
        key=key,
        extra=options.extra,
        tls=ssl.create_default_context(cafile=options.ca_file) if options.ca_file else None,
    )

    async def run() -> dict[str, Any]:
        import signal

        for name in (signal.SIGTERM, signal.SIGINT):  # ends as if the time were up: running requests finish
            asyncio.get_running_loop().add_signal_handler(name, lambda: setattr(load, "stopping", True))
        return await load.run()

    result = asyncio.run(run())
    print(json.dumps(result), flush=True)
    return 0 if result["ok"] and not result["failed"] and not result["cut"] else 1


if __name__ == "__main__":
    sys.exit(main())
