"""Tracebacks as real SGLang prints them: files, lines and functions by release, from data/frames.tsv.

The call texts are written here; only where they stand was read from the published wheels.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable
from typing import NamedTuple

from . import releases

TABLE = os.path.join(os.path.dirname(__file__), "data", "frames.tsv")


class Frame(NamedTuple):
    """One line of a traceback."""

    file: str
    line: int
    function: str
    code: str


# key in data/frames.tsv -> the call that stands on that line
# (<< >> marks what Python underlines, where that is not all that stands after "=").
CODE: dict[str, str] = {
    "launch.run_server": "run_server(server_args)",
    "launch.launch_server": "launch_server(server_args)",
    "http.launch_server": "    ) = Engine._launch_subprocesses(",
    "engine.wait_ready": "scheduler_init_result.wait_for_ready()",
    "engine.wait": "raise _scheduler_died_error(i, scheduler_procs[i])",
    "engine.failed": "raise RuntimeError(",
    "sched.proc_loop": "scheduler.run_event_loop()",
    "sched.proc_init": "scheduler = Scheduler(",
    "sched.run_loop": "dispatch_event_loop(self)",
    "sched.dispatch_outer": "return _dispatch_event_loop_once(scheduler)",
    "sched.dispatch_normal": "scheduler.event_loop_normal()",
    "sched.dispatch_overlap": "scheduler.event_loop_overlap()",
    "sched.normal": "result = self.run_batch(batch)",
    "sched.overlap": "batch_result = self.run_batch(batch)",
    "stage.wrapper": "return profiled_func(self, *args, **kwargs)",
    "nvtx.wrapper": "return func(*args, **kwargs)",
    "sched.run_batch": "batch_result = self.model_worker.forward_batch_generation(",
    "sched.run_batch_overlap": "batch_result = self.model_worker.forward_batch_generation(",
    "sched.init": "self.init_model_worker()",
    "sched.init_model_worker.tp": "self.init_tp_model_worker()",
    "sched.init_model_worker.draft": "self.maybe_init_draft_worker()",
    "sched.init_model_worker.pools": "self.init_memory_pools()",
    "sched.init_model_worker.graphs": "self.init_all_cuda_graphs()",
    "sched.pools": "self.tp_worker.alloc_memory_pool()",
    "sched.pools_target": "self.init_target_memory_pool()",
    "sched.graphs": "self.tp_worker.init_cuda_graphs()",
    "sched.tp": "self.tp_worker = TpModelWorker(**worker_kwargs)",
    "sched.draft": "self.draft_worker = DraftWorkerClass(**draft_worker_kwargs)",
    "tp.init": "self._init_model_runner()",
    "tp.runner": "self._model_runner = ModelRunner(",
    "tp.graphs": "self.model_runner.init_cuda_graphs(",
    "tp.pool": "self.model_runner.alloc_memory_pool(memory_pool_config)",
    "tp.forward": "out = self.model_runner.forward(",
    "mr.init": "self.initialize()",
    "mr.init_dist": "self.init_torch_distributed()",
    "mr.dist11": "init_distributed_environment(",
    "mr.load": "self.load_model()",
    "mr.load_model": "self.model = self.loader.load_model(",
    "mr.pool11": "self.init_memory_pool(pre_model_load_memory)",
    "mr.pool14": "self.init_memory_pool(self.pre_model_load_memory)",
    "mr.graphs11": "self.init_device_graphs()",
    "mr.graphs14": "self.init_decode_cuda_graph()",
    "mr.forward": "output = self._forward_raw(",
    "mr.raw_graph": "ret = self.graph_runner.replay(",
    "mr.raw_decode": "ret = self.forward_decode(",
    "mr.ids": "target_layer_ids = draft_config.resolve_target_layer_ids(",
    "cg.capture": "self.graph_runner = graph_runners[self.device](self)",
    "runner.init": "self.capture()",
    "runner.raise": "raise Exception(",
    "runner.capture": "self._capture_one_stream()",
    "runner.one_stream": "self.capture_one_batch_size(bs, forward)",
    "runner.one_shape": "run_once()",
    "runner.run_once": "logits_output_or_pp_proxy_tensors = forward(",
    "runner.replay": "self.replay_prepare(forward_batch, pp_proxy_tensors)",
    "runner.replay_graph": "self.graphs[graph_key].replay()",
    "runner.prepare": "buffers.populate_from_forward_batch(",
    "buffers.populate": "_grouped_foreach_copy_(dsts, srcs)",
    "buffers.copy": "key = (dst.dtype, <<src.dtype>>)",
    "df.forward": "self._prepare_for_speculative_decoding(batch, draft_input)",
    "df.draft": "draft_logits_output = self.draft_model_runner.forward(",
    "df.target": "batch_result = self.target_worker.forward_batch_generation(",
    "df.append": "self._append_target_hidden_to_draft_kv(batch, draft_input)",
    "df.project": "ctx_hidden = self.draft_model.project_target_hidden(",
    "df.init": "self.draft_worker = TpModelWorker(",
    "df.init_mask": "self._mask_token_id = self._resolve_mask_token_id(",
    "df.mask": "raise ValueError(",
    "df.ids": "raise ValueError(",
    "draft.dims": "raise ValueError(",
    "dist.pg": "torch.distributed.init_process_group(",
    "pool.raise": "raise RuntimeError(msg)",
    "loader.load": "model = _initialize_model(",
    "loader.weights": "self.load_weights_and_postprocess(",
    "arch": "raise ValueError(",
    "cfg.get": "config = AutoConfig.from_pretrained(",
    "moe.ep": "raise ValueError(",
    "dflash.resolve_pp": "raise ValueError(",
    "dflash.resolve_path": "raise ValueError(",
    "dflash.resolve_block": "raise ValueError(",
}

# Since 0.5.14 these calls have other names.
CODE_SINCE_0_5_14: dict[str, str] = {
    "mr.raw_graph": "ret = self.decode_cuda_graph_runner.execute(",
    "runner.replay": "self.load_batch(forward_batch, pp_proxy_tensors)",
    "runner.replay_graph": "self.backend.replay(graph_key)",
    "runner.one_stream": "self.capture_one_shape(bs, forward)",
    "cg.capture": "runner = GraphRunnerCls(model_runner)",
    "df.forward": "draft_logits_output = self.draft_model_runner.forward(",
    "df.target": "target_out = self.target_worker.forward_batch_generation(",
    "df.append": "self._append_target_hidden_to_draft_kv_by_loc(",
    "df.project": "ctx_hidden = self.draft_model.project_target_hidden(target_hidden)",
}

_cache: dict[str, tuple[str, int, str]] = {}


def _table() -> dict[str, tuple[str, int, str]]:
    if not _cache:
        wanted = releases.nearest()
        with open(TABLE, encoding="utf-8") as stream:
            for row in stream:
                name, release, path, line, function = row.rstrip("\n").split("\t")
                if release == wanted:
                    _cache[name] = (path, int(line), function)
    return _cache


def site_packages() -> str:
    """Where the stand-in is installed: real tracebacks name that folder too."""
    return sysconfig.get_paths()["purelib"]


def frame(name: str) -> list[Frame]:
    """The frame of this key in the imitated release; none where that release has no such call."""
    if name == "torch.context":
        return [other("torch/utils/_contextlib.py", 124, "decorate_context", "return func(*args, **kwargs)")]
    found = _table().get(name)
    if found is None:
        return []
    path, line, function = found
    newer = releases.key(releases.RELEASE) >= releases.key("0.5.14")
    code = CODE_SINCE_0_5_14.get(name) if newer else None
    return [Frame(os.path.join(site_packages(), path), line, function, code or CODE[name])]


def other(path: str, line: int, function: str, code: str) -> Frame:
    """A frame of another package (torch, triton ...); `path` is below site-packages."""
    return Frame(os.path.join(site_packages(), path), line, function, code)


def lines(frames: Iterable[Frame]) -> list[str]:
    """The frames as Python 3.11 prints them, carets included."""
    text: list[str] = []
    for item in frames:
        code = item.code.strip()
        # Python underlines the part of the line that raised, and omits that where it is the whole line.
        match = re.match(r"^(.*)<<(.*)>>", code) or re.match(r"^(return |[^()]*? = |\) = )(.+)$", code)
        code = code.replace("<<", "").replace(">>", "")
        text += [f'  File "{item.file}", line {item.line}, in {item.function}', f"    {code}"]
        if match:
            text.append("    " + " " * len(match.group(1)) + "^" * len(match.group(2)))
    return text


def traceback(frames: Iterable[Frame], error: str) -> str:
    """One traceback block; `error` is its last part, "Type: message"."""
    return "\n".join(["Traceback (most recent call last):", *lines(frames), error]) + "\n"


def chained(first: str, second: str, during: bool = True) -> str:
    """Two blocks with the sentence Python puts between them."""
    sentence = (
        "During handling of the above exception, another exception occurred:"
        if during
        else "The above exception was the direct cause of the following exception:"
    )
    return f"{first}\n{sentence}\n\n{second}"
