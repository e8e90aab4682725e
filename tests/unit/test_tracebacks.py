"""Reading the lines of one process: prefixes, pieces, tracebacks in every shape."""

# ruff: noqa: E501  (log lines are as long as programs print them)
from __future__ import annotations

import random

import pytest
from dflash_fleet import tracebacks
from dflash_fleet.tracebacks import Line, Piece, clean, join_pieces, parse, split_prefix
from growth import is_linear


def lines(text: str) -> list[Line]:
    streams = join_pieces([Piece(number, 1, row) for number, row in enumerate(text.split("\n"))])
    return streams[1]


def only(text: str) -> tracebacks.Report:
    reports = parse(lines(text))
    assert len(reports) == 1, reports
    return reports[0]


@pytest.mark.parametrize(
    ("text", "rank", "tag", "rest"),
    [
        ("[2026-11-29 12:00:00] hello", "", "", "hello"),
        ("[2026-11-29 12:00:00.123 TP3 EP3] hello", "TP3 EP3", "", "hello"),
        ("[2026-11-29 12:00:00 DP1 PP0 ATTN_CP1 MOE_DP0 TP5 EP2]   deep", "DP1 PP0 ATTN_CP1 MOE_DP0 TP5 EP2", "", "  deep"),
        ("(EngineCore_DP0 pid=8402) ERROR 10-24 01:26:57 [core.py:710]   File", "", "EngineCore_DP0", "  File"),
        ("(APIServer pid=32) (EngineCore_0 pid=296) (VllmWorker TP0 pid=302) WARNING 10-24 01:26:57 [a.py:1] x", "", "VllmWorker TP0", "x"),
        ("(VllmWorker rank=0 pid=168) text", "", "VllmWorker rank=0", "text"),
        ("[rank0]:   File", "rank0", "", "  File"),
        ("(SGLangEngine pid=23902) [2026-01-04 01:42:55 TP1] x [repeated 2x across cluster]", "TP1", "SGLangEngine", "x"),
        ("llm0-1  | [2025-07-19 23:29:33 TP0] x", "TP0", "", "x"),
        ("2025-10-09T04:13:06.6371779Z [rank0]:   File", "rank0", "", "  File"),
        ("ERROR 10-29 18:38:39 async_llm_engine.py:58] Engine background task failed", "", "", "Engine background task failed"),
        ("2026-11-30 00:00:01.123 | ERROR    | stderr:write:10 - bar", "", "", "stderr:write:10 - bar"),
        ("INFO:     Started", "", "", "Started"),
    ],
)  # fmt: skip
def test_prefixes(text: str, rank: str, tag: str, rest: str) -> None:
    prefix, body = split_prefix(text)
    assert prefix is not None
    assert (prefix.rank, prefix.tag, body) == (rank, tag, rest)


@pytest.mark.parametrize("text", ["  File \"x\", line 1, in f", "RuntimeError: x", "[PG ID 2 Rank 1] x", "[1/9] nvcc -c x", "(x) y", "[W1130 00:00:00.1 a.cpp:1] x"])
def test_no_prefix(text: str) -> None:
    assert split_prefix(text) == (None, text)


def test_clean_takes_colour_and_bars() -> None:
    assert clean("\x1b[1;36mred\x1b[0m") == ["red"]
    assert clean("\r  0%|  | 0/4 [00:00<?, ?it/s]\r 50%|# | 2/4 [00:01<00:01, 1.9it/s]") == [" 50%|# | 2/4 [00:01<00:01, 1.9it/s]"]
    assert clean("a\n\nb  ") == ["a", "b"]
    assert clean("\r 50%|# | 1/2 [00:01<00:01, 1.9s/it][2026-11-29 12:00:00 TP1] Traceback\r 99%|# | 2/2 [00:02<00:00, 1.9s/it]")[1:2] == ["[2026-11-29 12:00:00 TP1] Traceback"]
    assert clean("Error text\r 50%|# | 2/4 [00:01<00:01, 1.9it/s]")[0] == "Error text"


PLAIN = """Traceback (most recent call last):
  File "/a/b.py", line 3, in f
    g()
  File "/a/c.py", line 7, in g
    raise ValueError("x")
    ^^^^^^^^^^^^^^^^^^^^^
  [Previous line repeated 5 more times]
ValueError: x"""


def test_plain() -> None:
    report = only(PLAIN)
    assert [(link.type, link.message) for link in report.links] == [("ValueError", "x")]
    assert [(frame.file, frame.line, frame.function) for frame in report.links[0].frames] == [("/a/b.py", 3, "f"), ("/a/c.py", 7, "g")]
    assert report.source_text == 'raise ValueError("x")'


@pytest.mark.parametrize(
    ("exception", "kind", "message"),
    [
        ("KeyError: 'a'", "KeyError", "'a'"),
        ("AssertionError", "AssertionError", ""),
        ("torch.OutOfMemoryError: CUDA out", "torch.OutOfMemoryError", "CUDA out"),
        ("zmq.error.ZMQError: Address already in use (addr='tcp://1')", "zmq.error.ZMQError", "Address already in use (addr='tcp://1')"),
        ("mod.Outer.<locals>.Inner: x", "mod.Outer.<locals>.Inner", "x"),
        ("ImportError:\n[k] CRITICAL: no\n- a: b", "ImportError", "[k] CRITICAL: no\n- a: b"),
        ("RuntimeError: first\nsecond\n[1/9] nvcc -c\n   57 | #include <x>\nninja: build stopped", "RuntimeError", "first\nsecond\n[1/9] nvcc -c\n   57 | #include <x>\nninja: build stopped"),
        ("ValueError:x", "ValueError", "x"),
        ("_queue.Empty", "_queue.Empty", ""),
    ],
)  # fmt: skip
def test_exception_lines(exception: str, kind: str, message: str) -> None:
    report = only(f'Traceback (most recent call last):\n  File "/a.py", line 1, in f\n    x\n{exception}\n[2026-11-29 12:00:00] next record')
    assert (report.links[0].type, report.links[0].message) == (kind, message)


@pytest.mark.parametrize(
    "after",
    [
        "[2026-11-29 12:00:00 TP1] other",
        "Fatal Python error: Aborted",
        "Process Process-3:",
        "[rank1]:[E909 08:45:30.1 ProcessGroupNCCL.cpp:2252] x",
        "gpu-01:12:99 [0] NCCL INFO Channel 00/0",
        "terminate called after throwing an instance of 'c10::Error'",
        "kill_process_tree called: parent_pid=1, include_parent=True, pid=1",
        "Exception ignored in: <function x>",
        "[W1130 00:00:00.1 a.cpp:1] Warning",
    ],
)
def test_message_ends(after: str) -> None:
    reports = parse(lines(PLAIN + "\nmore text\n" + after))
    assert reports[0].links[0].message == "x\nmore text"


def test_failure_behind_a_bar_keeps_its_rank() -> None:
    bar = "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.9s/it]"
    assert only(f"{bar}[2026-11-29 12:00:00 TP1] Scheduler hit an exception: {PLAIN}").prefix.rank == "TP1"


def test_chain() -> None:
    text = PLAIN + "\nDuring handling of the above exception, another exception occurred:\n" + PLAIN.replace("ValueError", "KeyError")
    text += "\nThe above exception was the direct cause of the following exception:\n" + PLAIN.replace("ValueError: x", "RuntimeError: Capture failed\nmore")
    report = only(text)
    assert [link.type for link in report.links] == ["ValueError", "KeyError", "RuntimeError"]
    assert report.links[2].message == "Capture failed\nmore"


def test_remote_traceback_is_the_root() -> None:
    text = 'concurrent.futures.process._RemoteTraceback: \n"""\n' + PLAIN + '\n"""\nThe above exception was the direct cause of the following exception:\n' + PLAIN.replace("ValueError", "Wrapped")
    report = parse(lines(text))[-1]
    assert report.links[0].type == "ValueError"


def test_group() -> None:
    report = only(
        """  + Exception Group Traceback (most recent call last):
  |   File "/a.py", line 1, in main
  |     raise eg
  | ExceptionGroup: many (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/b.py", line 2, in one
    |     f()
    | OSError: [Errno 28] No space left on device
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/c.py", line 3, in two
    |     g()
    | ValueError: closed
    +------------------------------------"""
    )
    assert [link.type for link in report.links] == ["OSError", "ValueError", "ExceptionGroup"]
    assert report.links[0].frames[-1].file == "/b.py"


def test_group_with_a_nested_group() -> None:
    report = only(
        """  + Exception Group Traceback (most recent call last):
  |   File "/a.py", line 1, in main
  | ExceptionGroup: outer (1 sub-exception)
  +-+---------------- 1 ----------------
    | Exception Group Traceback (most recent call last):
    |   File "/b.py", line 2, in one
    | ExceptionGroup: inner (1 sub-exception)
    +-+---------------- 1 ----------------
      | Traceback (most recent call last):
      |   File "/c.py", line 3, in two
      | KeyError: 'k'
      +------------------------------------"""
    )
    assert report.links[0].type == "KeyError"
    assert {link.message for link in report.links[1:]} == {"inner (1 sub-exception)", "outer (1 sub-exception)"}


def test_notes_belong_to_the_message() -> None:
    report = only(PLAIN + "\nwhile loading shard 3\nof 64")
    assert report.links[0].message == "x\nwhile loading shard 3\nof 64"


def test_syntax_error() -> None:
    report = only('Traceback (most recent call last):\n  File "/a.py", line 1, in <module>\n    import b\n  File "/b.py", line 12\n    def f(:\n          ^\nSyntaxError: invalid syntax')
    assert report.links[0].type == "SyntaxError"
    assert (report.links[0].frames[-1].file, report.links[0].frames[-1].line) == ("/b.py", 12)


def test_end_and_beginning_lost() -> None:
    cut = only("\n".join(PLAIN.split("\n")[:4]) + "\n[2026-11-29 12:00:00] next")
    assert cut.end_lost
    assert cut.links[0].type == ""
    late = only("\n".join(PLAIN.split("\n")[3:]))
    assert late.beginning_lost
    assert late.links[0].type == "ValueError"


def test_faulthandler_current_thread() -> None:
    report = only('Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File "/x.py", line 1 in a\n\nCurrent thread 0x2 [name] (most recent call first):\n  File "/y.py", line 351 in ncclCommInitRank\n  File "<frozen x>", line 2 in b\n  ...\n\nExtension modules: a, b (total: 2)')
    assert report.signal == "SIGSEGV"
    assert (report.frames[0].file, report.frames[0].line, report.frames[0].function) == ("/y.py", 351, "ncclCommInitRank")
    assert len(report.frames) == 2


def test_faulthandler_piece_by_piece() -> None:
    texts = ["Fatal Python error: ", "Segmentation fault", "", "Current thread 0x", "0000763b", " (most recent call first):", "  File ", '"/x.py"', ", line ", "1763", " in ", "f"]
    pieces = []
    for number, text in enumerate(texts):
        whole = text in ("Segmentation fault", " (most recent call first):", "f")
        if text.rstrip():
            pieces.append(Piece(number, 1, text.rstrip(), "" if whole else "pid-change"))
    report = parse(join_pieces(pieces)[1])[0]
    assert report.signal == "SIGSEGV"
    assert (report.frames[0].file, report.frames[0].line, report.frames[0].function) == ("/x.py", 1763, "f")


@pytest.mark.parametrize(("words", "signal"), [("Segmentation fault", "SIGSEGV"), ("Aborted", "SIGABRT"), ("Bus error", "SIGBUS"), ("Illegal instruction", "SIGILL"), ("Floating-point exception", "SIGFPE"), ("none_dealloc: deallocating None", "SIGABRT")])
def test_fatal_words(words: str, signal: str) -> None:
    assert only(f"Fatal Python error: {words}").signal == signal


def test_terminate() -> None:
    report = only("terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG 3 Rank 5] timeout\nException raised from checkTimeout at x.cpp:609\nframe #0: y")
    assert report.links[0].type == "c10::DistBackendError"
    assert report.links[0].message.startswith("[PG 3 Rank 5] timeout\nException raised")


def test_terminate_in_pieces() -> None:
    texts = ["terminate called after throwing an instance of '", "std::bad_alloc", "'", "  what():  ", "std::bad_alloc"]
    pieces = [Piece(number, 1, text.rstrip(), "" if number in (2, 4) else "pid-change") for number, text in enumerate(texts)]
    report = parse(join_pieces(pieces)[1])[0]
    assert (report.links[0].type, report.links[0].message) == ("std::bad_alloc", "std::bad_alloc")


def test_vllm_prefix_on_every_line_and_bar_between() -> None:
    prefix = "(EngineCore_DP0 pid=8402) ERROR 10-24 01:26:57 [core.py:710]"
    rows = [f"{prefix} {row}".rstrip() for row in (PLAIN + "\n\nThe above exception was the direct cause of the following exception:\n\n" + PLAIN.replace("ValueError", "KeyError")).split("\n")]
    rows.insert(3, "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:02<00:06,  2.1s/it]")
    rows.append("(EngineCore_DP0 pid=8402) Process EngineCore_DP0:")
    report = parse(lines("\n".join(rows)))[0]
    assert [link.type for link in report.links] == ["ValueError", "KeyError"]
    assert report.links[1].message == "x"


def test_ray_tag_goes_on_without_the_rank() -> None:
    rows = PLAIN.split("\n")
    text = "\n".join(["(SGLangEngine pid=2) [2026-01-04 01:42:55 TP1] Scheduler hit an exception: " + rows[0] + " [repeated 2x across cluster]"] + ["(SGLangEngine pid=2) " + row + " [repeated 2x across cluster]" for row in rows[1:]])
    report = parse(lines(text))[0]
    assert (report.links[0].type, report.links[0].message, report.prefix.rank) == ("ValueError", "x", "TP1")


def test_cut_between_words_gets_its_blank_back() -> None:
    words = frozenset({"out", "of", "memory", "illegal", "access", "allocate"})
    joined = join_pieces([Piece(0, 1, "CUDA out of", "pid-change"), Piece(1, 1, "memory. Tried to al", "pid-change"), Piece(2, 1, "locate 2 GiB")], words)
    assert joined[1][0].text == "CUDA out of memory. Tried to allocate 2 GiB"


def test_cut_prompt_is_not_joined_to_a_new_record() -> None:
    joined = join_pieces([Piece(0, 1, "Run it? [y/N]", "pid-change"), Piece(1, 1, "[2026-11-29 12:00:00] x")])
    assert [line.text for line in joined[1]] == ["Run it? [y/N]", "x"]


def test_line_max_is_joined_without_a_blank() -> None:
    joined = join_pieces([Piece(0, 1, "a" * 100, "line-max"), Piece(1, 1, "b")])
    assert joined[1][0].text == "a" * 100 + "b"


def test_every_cut_of_a_traceback_reads_the_same() -> None:
    """journald can cut at any write; whatever the place, type, message and frames come back."""
    chooser = random.Random(7)
    rows = PLAIN.split("\n")
    for _turn in range(200):
        pieces = []
        number = 0
        for row in rows:
            at = chooser.randrange(1, len(row)) if chooser.random() < 0.5 and len(row) > 4 else 0
            if at and row[:at].strip() and row[at:].strip() and row[at - 1 : at + 1].strip() == row[at - 1 : at + 1]:
                pieces += [Piece(number, 1, row[:at].rstrip(), "pid-change"), Piece(number + 1, 1, row[at:])]
            else:
                pieces.append(Piece(number, 1, row))
            number += 2
        report = parse(join_pieces(pieces)[1])[0]
        assert (report.links[0].type, report.links[0].message) == ("ValueError", "x")
        assert [(frame.file, frame.line) for frame in report.links[0].frames] == [("/a/b.py", 3), ("/a/c.py", 7)]


@pytest.mark.parametrize(
    "row",
    ["Traceback (most recent call last):", '  File "/a.py", line 1, in f', "RuntimeError: x", "During handling of the above exception, another exception occurred:", "Fatal Python error: Aborted", "terminate called after throwing an instance of 'a'",
     "  + Exception Group Traceback (most recent call last):", "  | x: y", "==== backtrace (tid:  1) ====", "    " + "^" * 500],
)  # fmt: skip
def test_linear(row: str) -> None:
    samples = {count: lines("\n".join([row] * count)) for count in (500, 32_000)}
    assert is_linear(lambda count: parse(samples[count]), 500, times=64)
