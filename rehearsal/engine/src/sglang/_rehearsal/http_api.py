"""The HTTP endpoints, with their true states: 503 while warming up, /v1/models early, /health that generates."""

from __future__ import annotations

import hmac
import json
import os
import socket
import socketserver
import time
import uuid
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Callable

from . import logs, releases, shapes, speculation

if TYPE_CHECKING:
    from .parent import Engine

OPEN_PREFIXES = ("/health", "/ready", "/metrics")  # never need a key
ADMIN_PATHS = frozenset(
    ("/flush_cache", "/abort_request", "/pause_generation", "/continue_generation", "/freeze_gc", "/start_profile",
     "/stop_profile", "/set_internal_state", "/configure_logging")
)  # fmt: skip


class Piece:
    """What one step gave a request."""

    def __init__(self, tokens: int, reason: str | None, spec: list[Any] | None) -> None:
        self.tokens, self.reason, self.spec = tokens, reason, spec


class Answer:
    """One request's answer while it grows."""

    def __init__(self, engine: Engine, rid: str, prompt: int, limit: int, ignore_eos: bool) -> None:
        self.engine, self.rid, self.prompt = engine, rid, prompt
        self.count = 0
        self.reason: str | None = None
        self.spec: list[Any] | None = None
        self.began = time.monotonic()
        self.first = 0.0
        self.limit = limit
        self.pieces = engine.submit(rid, prompt, limit, ignore_eos)

    def grow(self) -> Iterator[str]:
        """Yields the new text of each step."""
        while self.reason is None:
            piece: Piece = self.pieces.get()
            if not self.first:
                self.first = time.monotonic()
            start, self.count = self.count, self.count + piece.tokens
            self.spec = piece.spec or self.spec
            self.reason = piece.reason
            if self.reason is not None:
                now = time.monotonic()
                self.engine.metrics.finished(self.prompt, self.count, self.first - self.began, now - self.began)
            yield speculation.text(start, piece.tokens)

    def finish(self) -> None:
        for _ in self.grow():
            pass

    @property
    def text(self) -> str:
        return speculation.text(0, self.count)

    def ids(self) -> list[int]:
        return [100 + index % len(speculation.WORDS) for index in range(self.count)]

    def meta(self) -> dict[str, Any]:
        """meta_info of /generate."""
        finish: dict[str, Any] | None = None
        if self.reason == "length":
            finish = {"type": "length", "length": self.limit}
        elif self.reason == "stop":
            finish = {"type": "stop", "matched": 163586}
        info: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": finish,
            "prompt_tokens": self.prompt,
            "weight_version": "default",
            "num_retractions" if releases.has("correct_drafts_names") else "total_retractions": 0,
            "completion_tokens": self.count,
            "cached_tokens": 0,
        }
        if self.reason and self.spec:
            verifies, drafts, histogram = self.spec
            proposed = verifies * (self.engine.plan.block - 1)
            newer = releases.has("correct_drafts_names")
            info["spec_accept_rate"] = drafts / proposed if proposed else 0.0
            info["spec_accept_length"] = self.count / verifies
            info["spec_num_correct_drafts" if newer else "spec_accepted_drafts"] = drafts
            info["spec_num_proposed_drafts" if newer else "spec_proposed_drafts"] = proposed
            info["spec_verify_ct"] = verifies
            info["spec_correct_drafts_histogram" if newer else "spec_accept_histogram"] = histogram
        if self.reason:
            info["e2e_latency"] = time.monotonic() - self.began
        return info

    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.count,
            "completion_tokens": self.count,
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
        }
        if releases.has("completion_details"):
            usage["completion_tokens_details"] = None
        return usage


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread a connection: enough for hundreds of streams."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, host: str, port: int, engine: Engine) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.engine = engine
        super().__init__((host, port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server
    disable_nagle_algorithm = True

    @property
    def engine(self) -> Engine:
        return self.server.engine

    def version_string(self) -> str:
        return "uvicorn"

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: uvicorn's access line is written with the response."""

    # Plumbing -----------------------------------------------------------------------------------------------------
    def _start(self, status: int, headers: dict[str, str]) -> None:
        path = self.path.partition("?")[0]
        excluded = self.engine.plan.args.uvicorn_access_log_exclude_prefixes or []
        if not any(path.startswith(prefix) for prefix in excluded):
            host, port = self.client_address[:2]
            phrase = HTTPStatus(status).phrase
            logs.access(f'{host}:{port} - "{self.command} {self.path} HTTP/1.1" {status} {phrase}')
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: int, body: bytes = b"", kind: str = "application/json") -> None:
        headers = {"content-length": str(len(body))}
        if body:
            headers["content-type"] = kind
        self._start(status, headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value, separators=(",", ":")).encode())

    def _error(self, status: int, message: str) -> None:
        kind = HTTPStatus(status).phrase
        self._json({"object": "error", "message": message, "type": kind, "param": None, "code": status}, status)

    def _stream(self, events: Iterator[Any]) -> None:
        self._start(200, {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"})
        try:
            for event in events:
                data = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
                self._chunk(f"data: {data}\n\n".encode())
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        except OSError:
            self.close_connection = True
            raise

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _body(self) -> dict[str, Any]:
        length = int(self.headers.get("content-length") or 0)
        data = self.rfile.read(length) if length else b""
        try:
            value = json.loads(data or b"{}")
        except ValueError:
            raise Refusal(400, "There was an error parsing the body")
        if not isinstance(value, dict):
            raise Refusal(400, "Input should be a valid dictionary")
        return value

    def _allowed(self, path: str) -> bool:
        args = self.engine.plan.args
        if path.startswith(OPEN_PREFIXES):
            return True
        key = args.api_key
        if path in ADMIN_PATHS and args.admin_api_key:
            key = args.admin_api_key
        if not key:
            return True
        scheme, _, token = (self.headers.get("authorization") or "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), str(key).encode())

    # Routing ------------------------------------------------------------------------------------------------------
    def _route(self) -> None:
        path = self.path.partition("?")[0]
        # A body that is not read would be taken for the next request.
        body: dict[str, Any] | None = None
        try:
            refusal: Refusal | None = None
            try:
                body = self._body()
            except Refusal as error:
                refusal = error
            if not self._allowed(path):
                self._json({"error": "Unauthorized"}, 401)
                return
            methods, run = self._find(path)
            if run is None:
                self._json({"detail": "Not Found"}, 404)
                return
            if self.command not in methods and not (self.command == "HEAD" and "GET" in methods):
                self._json({"detail": "Method Not Allowed"}, 405)
                return
            if refusal is not None:
                raise refusal
            run(body or {})
        except Refusal as error:
            self._error(error.status, error.message)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _route

    def _find(self, path: str) -> tuple[tuple[str, ...], Callable[[dict[str, Any]], None] | None]:
        get, post, both = ("GET",), ("POST",), ("GET", "POST", "PUT")
        table: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], None]]] = {
            "/health": (get, self._health),
            "/health_generate": (get, self._health),
            "/v1/models": (get, self._models),
            "/model_info": (get, self._model_info),
            "/get_model_info": (get, self._model_info),
            "/server_info": (get, self._server_info),
            "/get_server_info": (get, self._server_info),
            "/v1/loads": (get, self._loads),
            "/ping": (get, lambda _: self._send(200)),
            "/generate": (("POST", "PUT"), self._generate),
            "/v1/completions": (post, self._completions),
            "/v1/chat/completions": (post, self._chat),
            "/flush_cache": (both, lambda _: self._send(200, b"Cache flushed.\n", "text/plain; charset=utf-8")),
            "/freeze_gc": (
                both,
                lambda _: self._send(200, b"Garbage collection frozen.\n", "text/plain; charset=utf-8"),
            ),
            "/abort_request": (post, self._abort),
            "/pause_generation": (post, lambda _: self._pause(True)),
            "/continue_generation": (post, lambda _: self._pause(False)),
        }
        if releases.has("ready_endpoint"):
            table["/ready"] = (get, self._ready)
        if self.engine.plan.args.enable_metrics:
            table["/metrics"] = (get, self._metrics)
        if path.startswith("/v1/models/"):
            return get, self._model
        return table.get(path.rstrip("/") if path == "/metrics/" else path, ((), None))

    # State --------------------------------------------------------------------------------------------------------
    def _ready(self, _: dict[str, Any]) -> None:
        engine = self.engine
        good = engine.status == "Up" and not engine.draining and not engine.paused
        self._send(200 if good else 503)

    def _health(self, _: dict[str, Any]) -> None:
        engine = self.engine
        if engine.draining:
            logs.info("Health check request received during shutdown. Returning 503.")
            self._send(503)
            return
        if engine.status == "Starting":
            self._send(503)
            return
        generates = os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "true").lower() in ("1", "true", "yes")
        if not generates and self.path.partition("?")[0] == "/health":
            self._send(200)
            return
        if engine.zombie:
            # Releases without a watchdog go on answering: nobody asks the dead schedulers.
            time.sleep(1)
            self._send(200)
            return
        tic = time.time()
        limit = int(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20"))
        rid = f"HEALTH_CHECK_{uuid.uuid4().hex}"
        engine.submit(rid, 1, 1, True)
        while time.time() < tic + limit:
            time.sleep(1)
            if engine.last_receive > tic:
                engine.forget(rid)
                engine.status = "Up"
                self._send(200)
                return
        stamps = [time.strftime("%H:%M:%S", time.localtime(moment)) for moment in (tic, engine.last_receive)]
        logs.error(
            f"Health check failed. Server couldn't get a response from detokenizer for last {limit} seconds. "
            f"tic start time: {stamps[0]}. last_heartbeat time: {stamps[1]}"
        )
        engine.forget(rid)
        engine.status = "UnHealthy"
        self._send(503)

    def _card(self) -> dict[str, Any]:
        plan = self.engine.plan
        name = plan.args.served_model_name
        return {
            "id": name,
            "object": "model",
            "created": int(self.engine.began),
            "owned_by": "sglang",
            "root": name,
            "parent": None,
            "max_model_len": int(plan.args.context_length or plan.target.context),
        }

    def _models(self, _: dict[str, Any]) -> None:
        self._json({"object": "list", "data": [self._card()]})

    def _model(self, _: dict[str, Any]) -> None:
        name = self.path.partition("?")[0][len("/v1/models/") :]
        if name != self.engine.plan.args.served_model_name:
            self._error(404, f"The model '{name}' does not exist")
            return
        self._json(self._card())

    def _deprecated(self, name: str) -> None:
        if self.path.partition("?")[0] == f"/get_{name}":
            logs.warning(
                f"Endpoint '/get_{name}' is deprecated and will be removed in a future version. "
                f"Please use '/{name}' instead."
            )

    def _model_info(self, _: dict[str, Any]) -> None:
        self._deprecated("model_info")
        plan = self.engine.plan
        self._json(
            {
                "model_path": plan.args.model_path,
                "served_model_name": plan.args.served_model_name,
                "tokenizer_path": plan.args.tokenizer_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "has_image_understanding": plan.target.sees_images,
                "has_audio_understanding": False,
                "model_type": plan.target.model_type,
                "architectures": [plan.target.architecture],
                "rehearsal": True,
            }
        )

    def _server_info(self, _: dict[str, Any]) -> None:
        self._deprecated("server_info")
        engine, plan = self.engine, self.engine.plan
        state = engine.ask_state()
        internal: dict[str, Any] = {
            **plan.args.as_dict(),
            "last_gen_throughput": state["speed"],
            "memory_usage": {
                "weight": round(engine.settings.gpu_gb * 0.788, 2),
                "kvcache": round(shapes.pool_tokens(plan) * 70272 / 2**30, 2),
                "token_capacity": shapes.pool_tokens(plan),
                "graph": 1.04 if plan.decode_graphs else 0,
            },
            "effective_max_running_requests_per_dp": plan.args.max_running_requests,
            "decode_cuda_graph_bs": plan.capture_sizes if plan.decode_graphs else None,
        }
        if plan.speculative and state["accept"]:
            internal["avg_spec_accept_length"] = state["accept"]
        info: dict[str, Any] = {
            **plan.args.as_dict(),
            "status": "ready",
            "max_total_num_tokens": shapes.pool_tokens(plan),
            "max_req_input_len": int(plan.args.context_length or plan.target.context) - 6,
            "internal_states": [internal],
            "version": engine.version,
            "rehearsal": True,
        }
        if releases.has("launch_command"):
            info["launch_command"] = plan.launch_command
        if releases.has("startup_timings"):
            info["startup_time"] = engine.startup_time()
        self._json(info)

    def _loads(self, _: dict[str, Any]) -> None:
        engine = self.engine
        gauges = engine.gauges()
        load = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": gauges["running"],
            "num_waiting_reqs": gauges.get("queued", 0),
            "max_total_num_tokens": gauges["pool"],
            "max_running_requests": engine.plan.args.max_running_requests,
            "token_usage": gauges.get("usage", 0.0),
            "gen_throughput": gauges.get("speed", 0.0),
        }
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        ranks = len(engine.plan.ranks)
        self._json({"timestamp": stamp, "version": engine.version, "num_accelerators": ranks, "loads": [load]})

    def _metrics(self, _: dict[str, Any]) -> None:
        text = self.engine.metrics.render(self.engine.gauges())
        self._send(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _abort(self, body: dict[str, Any]) -> None:
        self.engine.abort(None if body.get("abort_all") else str(body.get("rid", "")))
        self._send(200)

    def _pause(self, paused: bool) -> None:
        if releases.has("ready_endpoint"):
            self.engine.paused = paused
        self._json({"message": "Generation paused." if paused else "Generation continued.", "status": "ok"})

    # Generation ---------------------------------------------------------------------------------------------------
    def _answer(self, prompt: int, limit: int, body: dict[str, Any], rid: str = "") -> Answer:
        engine = self.engine
        if engine.draining:
            raise Refusal(503, "Server is shutting down; it takes no new requests. [rehearsal]")
        context = int(engine.plan.args.context_length or engine.plan.target.context)
        if prompt >= context:
            raise Refusal(
                400, f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
            )
        rid = rid or uuid.uuid4().hex
        return Answer(engine, rid, prompt, min(limit, context - prompt), bool(body.get("ignore_eos")))

    def _abandon(self, answers: list[Answer]) -> None:
        for answer in answers:
            self.engine.abort(answer.rid)

    @staticmethod
    def _whole(value: Any, name: str, default: int) -> int:
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise Refusal(400, f"{name} must be a non-negative integer, got {value!r}.")
        return value or 1

    def _generate(self, body: dict[str, Any]) -> None:
        given = body.get("input_ids") if body.get("text") is None else body.get("text")
        if given is None:
            raise Refusal(400, "Either text, input_ids or input_embeds should be provided.")
        batch = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        params = body.get("sampling_params") or {}
        several = params if isinstance(params, list) else [params] * (len(given) if batch else 1)
        prompts = given if batch else [given]
        answers = []
        for prompt, sampling in zip(prompts, several):
            limit = self._whole(sampling.get("max_new_tokens"), "max_new_tokens", 128)
            rid = body.get("rid") if isinstance(body.get("rid"), str) and not batch else ""
            answers.append(self._answer(speculation.count_tokens(prompt), limit, sampling, str(rid or "")))
        if body.get("stream") and not batch:
            answer = answers[0]
            incremental = self.engine.plan.args.incremental_streaming_output

            def events() -> Iterator[Any]:
                for piece in answer.grow():
                    # Text so far, unless --incremental-streaming-output asks for pieces.
                    shown = piece if incremental else answer.text
                    yield {"text": shown, "output_ids": answer.ids(), "meta_info": answer.meta()}

            try:
                self._stream(events())
            except OSError:
                self._abandon(answers)
            return
        results = []
        for answer in answers:
            answer.finish()
            results.append({"text": answer.text, "output_ids": answer.ids(), "meta_info": answer.meta()})
        self._json(results if batch else results[0])

    def _completions(self, body: dict[str, Any]) -> None:
        prompt = body.get("prompt")
        if prompt is None:
            raise Refusal(
                400, "1 validation error:\n  {'type': 'missing', 'loc': ('body', 'prompt'), 'msg': 'Field required'}"
            )
        limit = self._whole(body.get("max_tokens"), "max_tokens", 16)
        many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        prompts = prompt if many else [prompt]
        answers = [self._answer(speculation.count_tokens(item), limit, body) for item in prompts]
        self._openai(body, answers, "text_completion")

    def _chat(self, body: dict[str, Any]) -> None:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            kind = "missing" if messages is None else "value_error"
            raise Refusal(
                400,
                f"1 validation error:\n  {{'type': '{kind}', 'loc': ('body', 'messages'), 'msg': 'Field required'}}",
            )
        context = int(self.engine.plan.args.context_length or self.engine.plan.target.context)
        asked = body.get("max_completion_tokens", body.get("max_tokens"))
        limit = self._whole(asked, "max_completion_tokens", context)
        # Four tokens a message for the template.
        prompt = sum(speculation.count_tokens(message) + 4 for message in messages)
        self._openai(body, [self._answer(prompt, limit, body)], "chat.completion")

    def _openai(self, body: dict[str, Any], answers: list[Answer], kind: str) -> None:
        chat = kind == "chat.completion"
        head: dict[str, Any] = {
            "id": answers[0].rid,
            "object": kind,
            "created": int(time.time()),
            "model": body.get("model") or self.engine.plan.args.served_model_name,
        }
        if body.get("stream"):
            try:
                self._stream(self._openai_events(body, answers, head, chat))
            except OSError:
                self._abandon(answers)
            return
        choices = []
        for index, answer in enumerate(answers):
            answer.finish()
            choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": answer.reason}
            choice["matched_stop"] = None if answer.reason == "length" else 163586
            if chat:
                choice["message"] = {
                    "role": "assistant",
                    "content": answer.text,
                    "reasoning_content": None,
                }
            else:
                choice["text"] = answer.text
            choices.append(choice)
        usage = answers[0].usage()
        for answer in answers[1:]:
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                usage[name] += answer.usage()[name]
        self._json({**head, "choices": choices, "usage": usage, "metadata": {"weight_version": "default"}})

    def _openai_events(
        self, body: dict[str, Any], answers: list[Answer], head: dict[str, Any], chat: bool
    ) -> Iterator[Any]:
        if chat:
            head = {**head, "object": "chat.completion.chunk"}
        options = body.get("stream_options") or {}
        wants_usage = bool(options.get("include_usage"))
        continuous = bool(options.get("continuous_usage_stats"))

        def event(answer: Answer, index: int, part: dict[str, Any], reason: str | None) -> dict[str, Any]:
            choice = {"index": index, **part, "logprobs": None, "finish_reason": reason, "matched_stop": None}
            shown: dict[str, Any] = {**head, "choices": [choice]}
            if continuous:
                shown["usage"] = answer.usage()
            elif not chat:
                shown["usage"] = None
            return shown

        for index, answer in enumerate(answers):
            if chat:
                opening = {"reasoning_content": None, "role": "assistant", "content": ""}
                yield event(answer, index, {"delta": opening}, None)
            for piece in answer.grow():
                if chat:
                    yield event(answer, index, {"delta": {"reasoning_content": None, "content": piece}}, None)
                else:
                    yield event(answer, index, {"text": piece}, answer.reason)
            if chat:
                yield event(answer, index, {"delta": {"reasoning_content": None}}, answer.reason)
        if wants_usage:
            total = answers[0].usage()
            for answer in answers[1:]:
                for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                    total[name] += answer.usage()[name]
            yield {**head, "choices": [], "usage": total}
