"""The load client against a server in this process: what it counts, and what it takes for a broken answer."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from dflash_fleet import load


def event(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


TEXT = {"choices": [{"text": "ab", "finish_reason": None}]}
LAST = {"choices": [{"text": "c", "finish_reason": "length"}], "meta_info": {"spec_accept_length": 3.5}}
USAGE = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 7}}
WHOLE = [TEXT, LAST, USAGE, "[DONE]"]


def answer(events: list[Any], end: bool = True, chunks: bool = True, status: str = "200 OK") -> list[bytes]:
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\n"
    if not chunks:
        return [head.encode() + b"\r\n", *map(event, events)]
    pieces = [b"%x\r\n%s\r\n" % (len(one), one) for one in map(event, events)]
    return [head.encode() + b"Transfer-Encoding: chunked\r\n\r\n", *pieces, *([b"0\r\n\r\n"] if end else [])]


def against(pieces: list[bytes], pause: float = 0.0, **options: Any) -> tuple[dict[str, Any], list[bytes]]:
    """A run against a server that answers with these pieces; its result, and what the server was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        asked.append(head + await reader.readexactly(length))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        writer.close()

    async def run() -> dict[str, Any]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        settings: dict[str, Any] = {"requests": 3, "concurrency": 2, **options}
        try:
            return await load.Load(f"http://127.0.0.1:{port}", "m", ["hello"], **settings).run()
        finally:
            server.close()

    return asyncio.run(run()), asked


def counts(result: dict[str, Any]) -> tuple[int, int, int]:
    return result["ok"], result["failed"], result["cut"]


@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_tokens_are_the_servers_however_the_bytes_arrive(chunks: bool, size: int) -> None:
    pieces = answer(WHOLE, chunks=chunks)
    if size:
        whole = b"".join(pieces)
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    result, asked = against(pieces)
    assert counts(result) == (3, 0, 0), result["reasons"]
    assert (result["output_tokens"], result["input_tokens"], result["without_usage"]) == (21, 12, 0)
    assert result["accept_length"] == 3.5
    body = json.loads(asked[0].split(b"\r\n\r\n", 1)[1])
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["prompt"] == "hello"


@pytest.mark.parametrize(
    ("pieces", "outcome", "reason"),
    [
        (answer(WHOLE[:2], end=False), "cut", "broke off"),
        (answer(WHOLE[:3], end=True), "cut", "without [DONE]"),
        (answer(WHOLE[:2], chunks=False), "cut", "broke off"),
        (answer([TEXT, {"error": {"message": "abort"}}, "[DONE]"]), "cut", "abort"),
        (answer([USAGE | {"usage": None}, "[DONE]"]), "cut", "without a token"),
        ([answer(WHOLE)[0], b"zz\r\n"], "cut", "chunk header"),
        (answer(WHOLE, status="503 Service Unavailable"), "failed", "HTTP 503"),
        ([], "failed", "closed before"),
        ([b"nonsense\r\n\r\n"], "failed", ""),
    ],
)
def test_an_answer_without_its_end_is_never_ok(pieces: list[bytes], outcome: str, reason: str) -> None:
    result, _ = against(pieces, requests=1)
    assert result["ok"] == 0
    assert result[outcome] == 1
    assert reason in next(iter(result["reasons"]))


def test_a_request_without_end_is_given_up() -> None:
    result, _ = against(answer(WHOLE), pause=0.3, requests=1, timeout=0.5)
    assert counts(result) == (0, 0, 1)
    assert "no end after 0.5 s" in result["reasons"]


def test_a_refused_connection_is_a_failure() -> None:
    result = asyncio.run(load.Load("http://127.0.0.1:1", "m", ["x"], requests=1).run())
    assert counts(result) == (0, 1, 0)


def test_times_are_those_of_the_stream() -> None:
    result, _ = against(answer(WHOLE), pause=0.05, requests=1)
    assert 45 <= result["ttft_ms"]["p50"] <= 120
    assert 45 <= result["itl_ms"]["p50"] <= 90  # one gap: the usage event is no token
    assert 45 / 6 <= result["tpot_ms"]["p50"] <= 90 / 6
    assert 200 <= result["e2e_ms"]["p50"] <= 400


def test_the_first_event_of_a_chat_is_no_token() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    text = {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}
    result, asked = against(answer([role, text, USAGE, "[DONE]"]), pause=0.05, endpoint="chat", requests=1)
    assert result["ttft_ms"]["p50"] >= 95
    assert b"POST /v1/chat/completions " in asked[0]


def test_the_key_is_sent() -> None:
    assert b"Authorization: Bearer secret\r\n" in against(answer(WHOLE), key="secret", requests=1)[1][0]


def test_requests_under_way_are_finished_when_the_time_is_up() -> None:
    begun = time.perf_counter()
    result, asked = against(answer(WHOLE), pause=0.1, requests=None, seconds=0.2, concurrency=4)
    assert result["requests"] == result["ok"] == len(asked) == 4
    assert time.perf_counter() - begun < 3


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], None), ([0.001], {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0})],
)
def test_percentiles_of_few(values: list[float], expected: Any) -> None:
    assert load.percentiles(values) == expected


def test_percentiles_are_nearest_rank() -> None:
    found = load.percentiles([number / 1000 for number in range(1, 101)])
    assert found == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}


def generated(count: int, text: str, **more: Any) -> dict[str, Any]:
    """An event of SGLang's own /generate: the text so far, and the count of tokens so far."""
    meta = {"prompt_tokens": 4, "completion_tokens": count, "finish_reason": None, **more}
    return {"text": text, "meta_info": meta}


GENERATED = [
    generated(1, "a"),
    generated(4, 'ab "completion_tokens":99 cd'),
    generated(8, "abcde", finish_reason={"type": "length", "length": 8}, spec_accept_length=3.5),
    "[DONE]",
]


def test_the_engines_own_endpoint_says_tokens_and_accept_length() -> None:
    result, asked = against(answer(GENERATED), endpoint="generate", ignore_eos=True, temperature=0, max_tokens=8)
    assert counts(result) == (3, 0, 0), result["reasons"]
    assert (result["output_tokens"], result["input_tokens"], result["without_usage"]) == (24, 12, 0)
    assert result["accept_length"] == 3.5
    assert result["accept_lengths"]["p50"] == 3.5
    body = json.loads(asked[0].split(b"\r\n\r\n", 1)[1])
    assert asked[0].startswith(b"POST /generate ")
    assert body["text"] == "hello"
    assert body["sampling_params"] == {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
    assert "model" not in body


def test_a_chunk_of_several_tokens_is_several_tokens_apart() -> None:
    result, _ = against(answer(GENERATED), endpoint="generate", pause=0.06, requests=1)
    # Gaps of 60 ms with 3 and 4 tokens in them, and of more on a busy machine.
    assert result["itl_ms"]["p50"] >= 60 / 4
    assert result["tpot_ms"]["p50"] >= 120 / 7
    assert result["request_tps"]["p50"] <= 8 / 0.18
    # Counted by chunks, a gap would be several times as long as it is for a token.
    assert result["itl_ms"]["p50"] < result["e2e_ms"]["p50"] / 4


def test_fixed_lengths_are_asked_for_on_every_endpoint() -> None:
    for endpoint in ("completions", "chat"):
        _, asked = against(answer(WHOLE), endpoint=endpoint, ignore_eos=True, requests=1)
        assert json.loads(asked[0].split(b"\r\n\r\n", 1)[1])["ignore_eos"] is True


def test_the_lower_end_of_what_should_be_high() -> None:
    found = load.spread([float(number) for number in range(1, 101)])
    assert found == {"mean": 50.5, "min": 1.0, "p10": 10.0, "p50": 50.0, "p90": 90.0}
    assert load.spread([]) is None
