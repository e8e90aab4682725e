"""Failures as an adversary would write them: how each program really ends, and what must not be taken for it."""

# ruff: noqa: E501  (a case a line; every case is a function named _)
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_fleet import diagnosis

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import journal_cases as jc
from journal_builder import BATCH, LOOP, MESSAGE_IDS, RUN, Journal, Run, S, traceback

Build = Callable[[], Journal]
CASES: list[tuple[str, Build, dict[str, Any]]] = []


def adv(name: str, **want: Any) -> Callable[[Build], Build]:
    def d(fn: Build) -> Build:
        CASES.append((name, fn, want))
        return fn

    return d


L = [(jc.RUNNER, 700, "load_model")]


def dies_serving(text: str, rank: int = 0, ranks: int = 2, kernel: tuple[str, ...] = ()) -> Journal:
    """One rank of a serving engine raises, after lines of the kernel about its process ({pid})."""
    j, r = jc.start(ranks)
    r.to_serving()
    for line in kernel:
        j.kernel(line.format(pid=r.pid_of(rank)))
    r.raise_in(rank, text)
    r.self_kill(True)
    return j


def spawn(r: Run, text: str, **more: str) -> None:
    """What systemd says in the name of the process that it could not start."""
    r.journal.add(
        f"{r.unit}: {text}",
        _PID="777",
        _COMM="(python3)",
        SYSLOG_IDENTIFIER="(python3)",
        UNIT=r.unit,
        INVOCATION_ID=r.invocation,
        _SYSTEMD_UNIT=r.unit,
        _SYSTEMD_INVOCATION_ID=r.invocation,
        _TRANSPORT="journal",
        **more,
    )


@adv("stop while loading, only Stopped", verdict="stopped_by_operator", cause="none")
def _() -> Journal:
    j, r = jc.start(2)
    r.to_weights()
    r.exit()
    r.stopped()
    return j


@adv("stop while loading, TERM before handlers", verdict="stopped_by_operator", cause="none")
def _() -> Journal:
    j = Journal()
    r = j.run()
    r.start()
    j.tick(1)
    r.stopping()
    r.exit()
    r.stopped()
    return j


@adv("stop while loading raises KeyboardInterrupt-like noise", verdict="stopped_by_operator", cause="none")
def _() -> Journal:
    j, r = jc.start(2)
    r.to_weights()
    r.stopping()
    r.rank_raw(0, traceback([(jc.RUNNER, 1, "load_model")], "KeyboardInterrupt"))
    r.exit(1)
    return j


@adv("stop timed out, killed by systemd", verdict="stopped_by_operator", cause="none")
def _() -> Journal:
    j, r = jc.start(2)
    r.to_serving()
    r.stopping()
    r.systemd(f"{r.unit}: State 'stop-sigterm' timed out. Killing.")
    r.systemd(f"{r.unit}: Killing process {r.main} (python3) with signal SIGKILL.")
    r.exit(signal=9, result="timeout")
    return j


@adv("auto restart Stopped is no operator", verdict="crashed_exit_zero")
def _() -> Journal:
    j, r = jc.start(1)
    r.to_serving()
    r.exit()
    r.systemd(f"{r.unit}: Scheduled restart job, restart counter is at 1.", "restart", N_RESTARTS="1")
    r.systemd(f"Stopped {r.unit} - SGLang main.", "stopped", JOB_TYPE="restart", JOB_RESULT="done")
    return j


@adv("oomd", verdict="crashed", cause="host_oom_killer")
def _() -> Journal:
    j, r = jc.start(2)
    r.to_serving()
    r.systemd(f"{r.unit}: systemd-oomd killed 11 process(es) in this unit.", "oomd")
    r.exit(signal=9, result="oom-kill")
    return j


@adv("cgroup oom of a rank", verdict="crashed", cause="host_memory_limit", rank="TP1")
def _() -> Journal:
    j, r = jc.start(2)
    r.to_weights()
    p = r.pid_of(1)
    j.kernel(
        f"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/system.slice/{r.unit},task_memcg=/system.slice/{r.unit},task=sglang::schedul,pid={p},uid=990"
    )
    j.kernel(
        f"Memory cgroup out of memory: Killed process {p} (sglang::schedul) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:990 pgtables:1kB oom_score_adj:0"
    )
    r.systemd(f"{r.unit}: A process of this unit has been killed by the OOM killer.", "oom")
    r.exit(signal=9, result="oom-kill")
    return j


@adv("oom kill of a neighbour only", verdict="crashed", cause="unknown", oom=False)
def _() -> Journal:
    return dies_serving(
        traceback([RUN, LOOP, BATCH], "KeyError: 'rid-7'"),
        kernel=(
            "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=trainer.service,mems_allowed=0-1,global_oom,task_memcg=/system.slice/trainer.service,task=python,pid=999,uid=1000",
            "Out of memory: Killed process 999 (python) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:1000 pgtables:1kB oom_score_adj:0",
        ),
    )


@adv("watchdog of systemd", verdict="hung", cause="scheduler_hang")
def _() -> Journal:
    j, r = jc.start(2)
    r.to_serving()
    j.tick(60)
    r.systemd(f"{r.unit}: Watchdog timeout (limit 1min)!")
    r.systemd(f"{r.unit}: Killing process {r.main} (python3) with signal SIGABRT.")
    r.exit(signal=6, result="watchdog", dumped=True)
    return j


@adv("start timeout with stop-sigterm", verdict="startup_timeout", cause="start_timeout", phase="weights")
def _() -> Journal:
    j, r = jc.start(2)
    r.to_weights()
    r.systemd(f"{r.unit}: start operation timed out. Terminating.")
    r.log("SIGTERM received. signum=15 frame=None. Draining requests and shutting down...")
    r.exit(signal=9, result="timeout")
    return j


@adv("start limit hides old result", verdict="crashed", cause="gpu_oom_weights")
def _() -> Journal:
    j = jc.simple_load_crash(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB of which 1.1 GiB is free.",
        [*L, (f"{S}/layers/linear.py", 10, "create_weights")],
        ranks=2,
    )
    j.tick(20)
    systemd = {"_PID": "1", "_COMM": "systemd", "SYSLOG_IDENTIFIER": "systemd", "UNIT": j.unit, "_TRANSPORT": "journal"}
    j.add(f"{j.unit}: Start request repeated too quickly.", **systemd)
    j.add(
        f"{j.unit}: Failed with result 'exit-code'.", **systemd, MESSAGE_ID=MESSAGE_IDS["failed"], UNIT_RESULT="exit-code"
    )
    return j


@adv("notify exception group in lifespan", verdict="crashed", type="ValueError")
def _() -> Journal:
    return jc.printed(
        '  + Exception Group Traceback (most recent call last):\n  |   File "/opt/venv/lib/python3.11/site-packages/sglang/srt/entrypoints/http_server.py", line 300, in lifespan\n  |     async with anyio.create_task_group() as tg:\n  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n    |   File "/opt/venv/lib/python3.11/site-packages/sglang/srt/x.py", line 3, in f\n    |     raise ValueError(\'bad\')\n    | ValueError: bad template\n    | note: while reading chat template\n    +------------------------------------',
        status=1,
    )


@adv("address in use by uvicorn", verdict="crashed", cause="port_in_use")
def _() -> Journal:
    j, r = jc.start(1)
    r.to_warmup()
    r.log("ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use")
    r.exit(1)
    return j


@adv("xid 13 application", verdict="crashed", cause="cuda_illegal_memory_access")
def _() -> Journal:
    return dies_serving(
        traceback(
            jc.VERIFY, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n" + jc.CUDA_TAIL
        ),
        rank=1,
        kernel=(
            "NVRM: Xid (PCI:0000:41:00): 31, pid={pid}, name=sglang::schedul, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f_0000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
        ),
    )


@adv("xid 95 uncontained", verdict="crashed", cause="gpu_xid_hardware")
def _() -> Journal:
    return dies_serving(
        traceback(
            jc.VERIFY, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n" + jc.CUDA_TAIL
        ),
        kernel=(
            "NVRM: Xid (PCI:0000:41:00): 95, pid={pid}, name=sglang::schedul, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
        ),
    )


@adv("xid of another process", verdict="crashed", cause="unknown")
def _() -> Journal:
    return dies_serving(
        traceback([RUN, LOOP, BATCH], "KeyError: 'abc'"),
        rank=1,
        kernel=(
            "NVRM: Xid (PCI:0000:c1:00): 31, pid=4242, name=python, Ch 00000008, MMU Fault",
        ),
    )


@adv(
    "vllm memory access worker first",
    verdict="crashed",
    cause="cuda_illegal_memory_access",
    type="torch.AcceleratorError",
)
def _() -> Journal:
    j, r = jc.vllm_start()
    t = traceback(
        [
            ("vllm/v1/executor/multiproc_executor.py", 700, "worker_busy_loop"),
            ("vllm/v1/worker/gpu_model_runner.py", 3000, "execute_model"),
        ],
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    )
    jc.vllm_say(r, "Worker_TP1", 21102, "WorkerProc hit an exception.\n" + t, origin="multiproc_executor.py:817")
    jc.vllm_say(
        r,
        "EngineCore_DP0",
        21100,
        "EngineCore encountered a fatal error.\n"
        + traceback(
            [("vllm/v1/engine/core.py", 900, "run_busy_loop")],
            "RuntimeError: Worker failed with error 'CUDA error: an illegal memory access was encountered', please check the stack trace above for the root cause",
        ),
    )
    jc.vllm_end(r)
    return j


@adv("json as bytes with ansi", verdict="crashed", cause="gpu_oom", type="torch.OutOfMemoryError")
def _() -> Journal:
    j, r = jc.start(1)
    r.to_serving()
    for line in traceback(
        [RUN, LOOP, BATCH], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
    ).split("\n"):
        r.rank_raw(0, "\x1b[31m" + line + "\x1b[0m")
    r.self_kill(True)
    return j


@adv("hf 401", verdict="crashed", cause="hf_auth_gated")
def _() -> Journal:
    return jc.early_crash(
        "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-68)\n\nCannot access gated repo for url https://huggingface.co/org/k/resolve/main/config.json.\nAccess to model org/k is restricted. You must have access to it and be authenticated to access it. Please log in."
    )


@adv("hf 404", verdict="crashed", cause="hf_not_found")
def _() -> Journal:
    return jc.early_crash(
        "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1-68)\n\nRepository Not Found for url: https://huggingface.co/api/models/org/none/revision/main.\nPlease make sure you specified the correct `repo_id` and `repo_type`."
    )


@adv("hf revision", verdict="crashed", cause="hf_not_found")
def _() -> Journal:
    return jc.early_crash(
        "huggingface_hub.errors.RevisionNotFoundError: 404 Client Error. (Request ID: Root=1-68)\n\nRevision Not Found for url: https://huggingface.co/api/models/org/k/revision/zz.\nInvalid rev id: zz"
    )


@adv("hub read timeout", verdict="crashed", cause="network_transfer_failed")
def _() -> Journal:
    return jc.early_crash(
        "httpx.ReadTimeout: The read operation timed out",
        (("sglang/launch_server.py", 40, "<module>"), ("huggingface_hub/file_download.py", 400, "http_get")),
    )


@adv("safetensors invalid header", verdict="crashed", cause="weights_corrupt")
def _() -> Journal:
    return jc.simple_load_crash(
        "safetensors_rust.SafetensorError: Error while deserializing header: invalid header deserialization", L, ranks=2
    )


@adv("safetensors size", verdict="crashed", cause="weights_corrupt")
def _() -> Journal:
    return jc.simple_load_crash(
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
        L,
        ranks=2,
    )


@adv("index missing key", verdict="crashed", cause="drafter_mismatch")
def _() -> Journal:
    return jc.simple_load_crash(
        "RuntimeError: The size of tensor a (7168) must match the size of tensor b (4096) at non-singleton dimension 1",
        [
            (f"{S}/speculative/dflash_worker.py", 150, "__init__"),
            (jc.RUNNER, 700, "load_model"),
            (f"{S}/models/dflash.py", 300, "load_weights"),
        ],
        ranks=2,
        speculative_algorithm="DFLASH",
    )


@adv("config without hidden", verdict="crashed", cause="missing_model_file")
def _() -> Journal:
    return jc.early_crash(
        "OSError: Can't load the configuration of '/models/k'. If you were trying to load it from 'https://huggingface.co/models', make sure you don't have a local directory with the same name. Otherwise, make sure '/models/k' is the correct path to a directory containing a config.json file"
    )


@adv("bus error shm full", verdict="crashed", native="SIGBUS")
def _() -> Journal:
    j, r = jc.start(2)
    r.to_serving()
    r.rank_raw(
        1,
        'Fatal Python error: Bus error\n\nCurrent thread 0x00007f1 (most recent call first):\n  File "/opt/venv/lib/python3.11/site-packages/torch/storage.py", line 3 in x',
    )
    r.log(f"Subprocess scheduler_1 (pid={r.pid_of(1)}) crashed with exit code -7. Triggering SIGQUIT for cleanup...")
    r.self_kill(True)
    return j


@adv("illegal instruction", verdict="crashed", native="SIGILL", cause="native_abort")
def _() -> Journal:
    return jc.printed(
        'Fatal Python error: Illegal instruction\n\nCurrent thread 0x00007f1 (most recent call first):\n  File "/opt/venv/lib/python3.11/site-packages/numpy/x.py", line 3 in x',
        signal=4, dumped=True,
    )


@adv("segfault of main during gc, kernel line", verdict="crashed", native="SIGSEGV", cause="native_segfault")
def _() -> Journal:
    j = Journal()
    r = j.run().begin(1)
    r.to_weights()
    j.kernel(
        f"python3[{r.main}]: segfault at 10 ip 00007f1 sp 00007ff error 4 in libpython3.11.so.1.0[7f0+1000] likely on CPU 3 (core 3, socket 0)"
    )
    r.exit(signal=11, dumped=True)
    return j


@adv("heap corruption glibc", verdict="crashed", native="SIGABRT", cause="native_abort")
def _() -> Journal:
    j, r = jc.start(1)
    r.to_serving()
    r.rank_raw(
        0,
        'double free or corruption (!prev)\nFatal Python error: Aborted\n\nThread 0x00007f2 (most recent call first):\n  File "/x/threading.py", line 3 in wait\n\nCurrent thread 0x00007f1 (most recent call first):\n  File "/opt/venv/lib/python3.11/site-packages/sglang/srt/x.py", line 3 in f',
    )
    r.log(f"Subprocess scheduler_0 (pid={r.pid_of(0)}) crashed with exit code -6. Triggering SIGQUIT for cleanup...")
    r.self_kill(True)
    return j


@adv("driver mismatch", verdict="crashed", cause="driver_library_mismatch")
def _() -> Journal:
    return jc.early_crash("pynvml.NVMLError_LibRmVersionMismatch: RM has detected an NVML/RM version mismatch.")


@adv("no cuda gpus", verdict="crashed", cause="cuda_init_failed")
def _() -> Journal:
    return jc.early_crash(
        "RuntimeError: No CUDA GPUs are available",
        (("sglang/launch_server.py", 40, "<module>"), ("torch/cuda/__init__.py", 400, "_lazy_init")),
    )


@adv("no nvidia driver", verdict="crashed", cause="cuda_init_failed")
def _() -> Journal:
    return jc.early_crash(
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from http://www.nvidia.com/Download/index.aspx",
        (("sglang/launch_server.py", 40, "<module>"), ("torch/cuda/__init__.py", 400, "_lazy_init")),
    )


@adv("error 802", verdict="crashed", cause="cuda_init_failed")
def _() -> Journal:
    j = Journal()
    r = j.run()
    r.start()
    r.raw(
        "/opt/venv/lib/python3.11/site-packages/torch/cuda/__init__.py:180: UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:119.)\n  return torch._C._cuda_getDeviceCount() > 0"
    )
    r.raw(
        traceback(
            (("sglang/launch_server.py", 40, "<module>"), (f"{S}/utils/common.py", 900, "get_device")),
            "RuntimeError: No accelerator (CUDA, XPU, HPU, NPU) is available.",
        )
    )
    r.exit(1)
    return j


@adv("too many open files", verdict="crashed", cause="unknown")
def _() -> Journal:
    return jc.simple_load_crash("OSError: [Errno 24] Too many open files", L, ranks=2)


@adv("cuda graph invalidated", verdict="crashed", cause="cuda_graph_capture_failed")
def _() -> Journal:
    j, r = jc.start(2)
    r.to_graphs()
    jc.all_ranks(
        r,
        jc.capture_error(
            [(f"{S}/layers/moe/ep_moe.py", 1, "forward")],
            "torch.AcceleratorError: CUDA error: operation failed due to a previous error during capture\n"
            + jc.CUDA_TAIL,
        ),
        (1, 0),
    )
    r.self_kill()
    return j


@adv("template error of a request is no crash", verdict="running", cause="none")
def _() -> Journal:
    j, r = jc.start(1)
    r.to_serving()
    r.log(
        "ERROR:    Exception in ASGI application\n"
        + traceback([("starlette/routing.py", 1, "app")], "jinja2.exceptions.TemplateError: bad role")
    )
    r.rank(
        0,
        "Decode batch, #running-req: 2, #token: 1801, token usage: 0.01, cuda graph: True, gen throughput (token/s): 171.20, #queue-req: 0,",
    )
    r.log('INFO:     10.0.0.9:52000 - "POST /v1/chat/completions HTTP/1.1" 200 OK')
    return j


@adv("chdir", verdict="crashed")
def _() -> Journal:
    j = Journal()
    r = j.run()
    r.start()
    spawn(r, "Failed at step CHDIR spawning /usr/bin/python3: No such file or directory", MESSAGE_ID=MESSAGE_IDS["spawn"])
    r.exit(200)
    return j


@adv("credentials", verdict="crashed")
def _() -> Journal:
    j = Journal()
    r = j.run()
    r.start()
    spawn(r, "Failed to set up credentials: No such file or directory")
    spawn(r, "Failed at step CREDENTIALS spawning /usr/bin/python3: No such file or directory", MESSAGE_ID=MESSAGE_IDS["spawn"])
    r.exit(243)
    return j


@adv("detokenizer raises first", verdict="crashed", process="detokenizer", type="UnicodeDecodeError")
def _() -> Journal:
    j, r = jc.start(2)
    r.to_serving()
    r.lines(
        r.main + 300,
        f"[{r.clock}] DetokenizerManager hit an exception: "
        + traceback(
            [(f"{S}/managers/detokenizer_manager.py", 300, "run_detokenizer_process")],
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
        "sglang::detokenizer",
        "sglang::detoken",
    )
    r.self_kill(True)
    return j


@adv("tokenizer manager in main", verdict="crashed", type="KeyError")
def _() -> Journal:
    j, r = jc.start(2)
    r.to_serving()
    r.log(
        "TokenizerManager hit an exception: "
        + traceback([(f"{S}/managers/tokenizer_manager.py", 300, "handle_loop")], "KeyError: 'rid'")
    )
    r.log(f"kill_process_tree called: parent_pid={r.main}, include_parent=True, pid={r.main}")
    r.exit(signal=9)
    return j


@adv("rank killed during init", verdict="crashed", cause="unknown", rank="TP1")
def _() -> Journal:
    j, r = jc.start(2)
    r.to_weights()
    j.tick(9)
    r.log(
        traceback(
            [
                ("sglang/launch_server.py", 40, "<module>"),
                (f"{S}/entrypoints/engine.py", 800, "_wait_for_scheduler_ready"),
            ],
            "RuntimeError: Rank 1 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.",
        )
    )
    r.exit(1)
    return j


@adv("gloo noise after a quiet rank death", verdict="crashed", cause="gpu_oom", rank="TP1")
def _() -> Journal:
    j, r = jc.start(4)
    r.to_serving()
    r.raise_in(
        1, traceback([RUN, LOOP, BATCH], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.")
    )
    for k in (0, 2, 3):
        r.raise_in(
            k,
            traceback(
                [
                    RUN,
                    LOOP,
                    (f"{S}/managers/scheduler.py", 900, "recv_requests"),
                    ("torch/distributed/distributed_c10d.py", 2800, "broadcast"),
                ],
                "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:41234",
            ),
        )
    r.self_kill(True)
    return j


@adv("cut log, last line missing", verdict="crashed", cause="unknown", complete=False)
def _() -> Journal:
    lines = traceback([RUN, LOOP, BATCH], "X: y").split("\n")[:-1]
    return dies_serving("\n".join(lines), ranks=1)


@adv("rate limited", verdict="crashed", complete=False)
def _() -> Journal:
    j, r = jc.start(1)
    r.to_serving()
    j.dropped(1200)
    r.self_kill(True)
    return j


@adv("healthy after crash loop of three", verdict="crashed", cause="port_in_use")
def _() -> Journal:
    j = Journal()
    for _ in range(3):
        r = j.run().begin(1)
        r.to_warmup()
        r.log(
            "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): [errno 98] address already in use"
        )
        r.exit(1)
        j.tick(20)
    j.run().begin(1).to_serving()
    return j


@pytest.mark.parametrize(("build", "want"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_adverse(build: Build, want: dict[str, Any]) -> None:
    journal = build()
    result = diagnosis.diagnose(journal.entries, journal.unit)
    first, exception, native = result["first_failure"] or {}, result["exception"] or {}, result["native_fault"] or {}
    found = {
        **{name: result[name] for name in ("verdict", "cause", "phase", "complete")},
        "type": exception.get("type"), "rank": first.get("rank"), "process": first.get("process"), "native": native.get("signal"), "oom": result["kernel"]["oom_killed"],
    }  # fmt: skip
    assert {name: found[name] for name in want} == want
