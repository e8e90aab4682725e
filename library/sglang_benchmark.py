#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""Measure a server at one concurrency, several times."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_benchmark
short_description: Measure a serving engine at one concurrency
version_added: "0.1.0"
description:
  - Keeps so many streamed requests under way at a time, until all of a run are done, and says tokens per second, time
    to first token, time between tokens, whole time of a request, accept length and errors. Repeats that.
  - Tokens are the server's own counts, never chunks, of which each may hold several tokens when an engine speculates.
  - With I(generator=client) the load is made by this module and needs nothing but Python. With
    I(generator=bench_serving) it is made by the installed engine's own tool; the results have the same keys.
  - Its action on the controller adds O(context) to each run and appends it as a line of JSON to O(results).
options:
  url:
    description: Address of the server, with its port.
    type: str
    required: true
  model:
    description: Name that the server is asked for.
    type: str
    required: true
  api_key:
    description: Key of the server; empty for none.
    type: str
    default: ""
  endpoint:
    description: SGLang's own endpoint, which says accept lengths, or one that every server has.
    type: str
    choices: [generate, completions, chat]
    default: generate
  concurrency:
    description: Requests under way at a time.
    type: int
    required: true
  requests:
    description: Requests of a run; best a multiple of O(concurrency).
    type: int
    required: true
  repeats:
    description: Runs.
    type: int
    default: 3
  warmup:
    description: Requests before the first run that are not counted.
    type: int
    default: 0
  max_tokens:
    description: Tokens of an answer, at most.
    type: int
    default: 256
  lengths:
    description: Whether each answer has exactly O(max_tokens) tokens, or ends where the model ends it.
    type: str
    choices: [fixed, natural]
    default: fixed
  prompts:
    description: What is asked, in this order, from the beginning in each run.
    type: list
    elements: str
    required: true
  timeout:
    description: Seconds after which a request counts as lost.
    type: int
    default: 600
  generator:
    description: Who makes the load.
    type: str
    choices: [client, bench_serving]
    default: client
  python:
    description: Interpreter of the installed engine, for I(generator=bench_serving).
    type: path
  tokenizer:
    description: Directory of the model's tokenizer, for I(generator=bench_serving).
    type: path
  environment:
    description: Variables of the engine's environment, for I(generator=bench_serving), which imports the engine.
    type: dict
    default: {}
  unit:
    description: Unit of the engine, whose journal says how graphs were used and what memory is left.
    type: str
    default: ""
  context:
    description: What the action adds to each run on the controller.
    type: dict
    default: {}
  results:
    description: File on the controller to which the action appends.
    type: path
attributes:
  check_mode:
    support: full
    description: Asks the server nothing.
  diff_mode:
    support: none
    description: Changes nothing on the host.
  platform:
    platforms: Linux
    support: full
    description: Any with Python 3.9 or later.
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Measure eight streams
  sglang_benchmark:
    url: http://127.0.0.1:30000
    model: kimi-k2.6
    concurrency: 8
    requests: 32
    prompts: ["Explain how a heat pump works."]
  register: measured
"""

RETURN = r"""
runs:
  description: One entry a run.
  returned: outside check mode
  type: list
  elements: dict
  contains:
    generator: {description: Who made the load., type: str}
    concurrency: {description: Requests under way at a time., type: int}
    requests: {description: Requests., type: int}
    ok: {description: Those that were answered to their end., type: int}
    errors: {description: The others., type: int}
    reasons: {description: Their reasons with counts., type: dict}
    duration: {description: Seconds., type: float}
    input_tokens: {description: Tokens of the prompts., type: int}
    output_tokens: {description: Tokens of the answers., type: int}
    output_throughput: {description: Tokens per second of the whole server., type: float}
    request_tps: {description: "Tokens per second of a request: mean, min, p10, p50, p90.", type: dict}
    ttft_ms: {description: "Time to first token: mean, p50, p90, p99.", type: dict}
    itl_ms: {description: Time between tokens., type: dict}
    tpot_ms: {description: "Time per token after the first, by request.", type: dict}
    e2e_ms: {description: Whole time of a request., type: dict}
    accept_length: {description: "Mean of the requests, or null.", type: float}
    accept_lengths: {description: "Its spread over requests, or null.", type: dict}
engine_log:
  description:
    - What the engine's journal says of this time - C(graphs) and C(eager), lines of decoded batches with and without
      graphs; C(kv_tokens), the size of the pool; C(free_gpu_gb), memory left on a GPU after the load.
  returned: outside check mode
  type: dict
"""

import asyncio
import json
import os
import re
import tempfile
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import bench, load

# The tool's name by release: from 0.5.15 the old one is a shim that announces its removal.
FIND = "from importlib.util import find_spec as f; print(f('sglang.benchmark') and f('sglang.benchmark.serving') and 1)"
NAMES = {True: "sglang.benchmark.serving", False: "sglang.bench_serving"}
POOL = re.compile(r"max_total_num_tokens=(\d+)")
FREE = re.compile(r"available_gpu_mem=([\d.]+)")


def by_client(module: AnsibleModule, requests: int) -> dict[str, Any]:
    """One run of our own client."""
    wanted = module.params
    run = load.Load(
        wanted["url"],
        wanted["model"],
        wanted["prompts"],
        endpoint=wanted["endpoint"],
        concurrency=min(wanted["concurrency"], requests),
        requests=requests,
        max_tokens=wanted["max_tokens"],
        ignore_eos=wanted["lengths"] == "fixed",
        temperature=0,
        timeout=wanted["timeout"],
        key=wanted["api_key"],
    )
    return bench.from_load(asyncio.run(run.run()))


def by_engine(module: AnsibleModule, folder: str) -> dict[str, Any]:
    """One run of the engine's own tool."""
    wanted = module.params
    python, requests = wanted["python"], wanted["requests"]
    environment = {name: str(value) for name, value in {"HF_HUB_OFFLINE": "1", **wanted["environment"]}.items()}
    code, out, err = module.run_command([python, "-c", FIND], environ_update=environment)
    if code != 0:
        module.fail_json(msg=f"{python} has no SGLang that could measure: {err.strip()[-400:]}")
    prompts = os.path.join(folder, "prompts.jsonl")
    output = os.path.join(folder, "output.jsonl")
    with open(prompts, "w", encoding="utf-8") as stream:
        # The tool takes a prompt once, and wants an answer beside it, which it does not use with a given length.
        for number in range(requests):
            text = wanted["prompts"][number % len(wanted["prompts"])]
            turns = [{"content": text}, {"content": "an answer of four tokens at the least"}]
            stream.write(json.dumps({"conversations": turns}) + "\n")
    # The tool knows no limit for a request: at worst every round of them takes the whole time.
    limit = wanted["timeout"] * -(-requests // wanted["concurrency"]) + 300
    tool = NAMES[out.strip() == "1"]
    command = [
        "timeout", "--kill-after=10", str(limit),
        python, "-m", tool, "--backend", "sglang", "--base-url", wanted["url"],
        "--dataset-name", "custom", "--dataset-path", prompts, "--num-prompts", str(requests),
        "--sharegpt-output-len", str(wanted["max_tokens"]), "--max-concurrency", str(wanted["concurrency"]),
        "--model", wanted["tokenizer"], "--served-model-name", wanted["model"], "--tokenizer", wanted["tokenizer"],
        "--output-file", output, "--output-details", "--warmup-requests", "0", "--disable-tqdm", "--seed", "1",
        *(["--disable-ignore-eos"] if wanted["lengths"] == "natural" else []),
    ]  # fmt: skip
    # The key by the environment: a command line shows it to everybody on the host.
    key = {"OPENAI_API_KEY": wanted["api_key"]} if wanted["api_key"] else {}
    code, out, err = module.run_command(command, environ_update={**environment, **key})
    if code != 0:
        said = f"did not end within {limit} s" if code in (124, 137) else f"ended with {code}"
        module.fail_json(msg=f"{tool} {said}: {(err or out).strip()[-800:]}")
    with open(output, encoding="utf-8") as stream:
        line = json.loads(stream.readlines()[-1])
    return bench.from_bench_serving(line, requests, wanted["max_tokens"])


def engine_log(module: AnsibleModule, since: float) -> dict[str, Any]:
    """What the engine's journal says: graphs since then, memory since its start."""
    found: dict[str, Any] = {"graphs": None, "eager": None, "kv_tokens": None, "free_gpu_gb": None}
    unit = module.params["unit"]
    if not unit:
        return found
    code, invocation, _ = module.run_command(["systemctl", "show", unit, "--property=InvocationID", "--value"])
    if code != 0 or not invocation.strip():
        return found
    match = f"_SYSTEMD_INVOCATION_ID={invocation.strip()}"
    journal = ["journalctl", "--no-pager", "--all", "-o", "cat", match]
    _, recent, _ = module.run_command([*journal, f"--since=@{int(since)}", "--grep=cuda graph: (True|False)"])
    found["graphs"], found["eager"] = recent.count("cuda graph: True"), recent.count("cuda graph: False")
    _, memory, _ = module.run_command([*journal, "--grep=max_total_num_tokens="])
    for name, pattern, kind in (("kv_tokens", POOL, int), ("free_gpu_gb", FREE, float)):
        values = pattern.findall(memory)
        if values:
            found[name] = min(kind(value) for value in values)
    return found


def main() -> None:
    """Warm up, run, read the log."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "endpoint": {"type": "str", "choices": ["generate", "completions", "chat"], "default": "generate"},
            "concurrency": {"type": "int", "required": True},
            "requests": {"type": "int", "required": True},
            "repeats": {"type": "int", "default": 3},
            "warmup": {"type": "int", "default": 0},
            "max_tokens": {"type": "int", "default": 256, "no_log": False},
            "lengths": {"type": "str", "choices": ["fixed", "natural"], "default": "fixed"},
            "prompts": {"type": "list", "elements": "str", "required": True},
            "timeout": {"type": "int", "default": 600},
            "generator": {"type": "str", "choices": ["client", "bench_serving"], "default": "client"},
            "python": {"type": "path"},
            "tokenizer": {"type": "path", "no_log": False},
            "environment": {"type": "dict", "default": {}},
            "unit": {"type": "str", "default": ""},
            "context": {"type": "dict", "default": {}},
            "results": {"type": "path"},
        },
        required_if=[("generator", "bench_serving", ("python", "tokenizer"))],
        supports_check_mode=True,
    )
    wanted = module.params
    if not wanted["prompts"]:
        module.fail_json(msg="prompts is empty: there is nothing to ask")
    for name in ("concurrency", "requests", "repeats", "max_tokens"):
        if wanted[name] < 1:
            module.fail_json(msg=f"{name}: {wanted[name]} is less than 1")
    if module.check_mode:
        module.exit_json(changed=False, msg="asks the server nothing in check mode")
    begun = time.time()
    try:
        if wanted["warmup"]:
            by_client(module, wanted["warmup"])
        if wanted["generator"] == "client":
            runs = [by_client(module, wanted["requests"]) for _ in range(wanted["repeats"])]
        else:
            runs = []
            for _ in range(wanted["repeats"]):
                with tempfile.TemporaryDirectory(prefix="dflash-fleet-bench-") as folder:
                    runs.append(by_engine(module, folder))
    except ValueError as problem:  # an address that is none
        module.fail_json(msg=str(problem))
    module.exit_json(changed=False, runs=runs, engine_log=engine_log(module, begun))


if __name__ == "__main__":
    main()
