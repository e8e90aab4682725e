"""A server that speaks just enough of SGLang's HTTP for the gate's tests."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass  # a client that has given up is part of the tests


class FakeServer:
    """Answers on a port of its own. Behaviour is in plain attributes, which a test may change while it runs."""

    def __init__(self, **behaviour):
        self.names = ["kimi"]
        self.up = True
        self.key = None
        self.accept = 3.4  # None: no speculation
        self.status = 200  # of generations
        self.body = None  # of generations, instead of the usual one
        self.short = 0  # tokens missing at the end
        self.delay = 0.0  # s
        self.drop = False  # close the connection instead of answering
        self.has_ready = True
        self.refuses_ignore_eos = False
        self.seen = []  # (method, path, body, headers)
        self.at_once = 0  # most generations at the same time
        self._running = 0
        self._lock = threading.Lock()
        self.__dict__.update(behaviour)
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_args):
                pass

            def do_GET(self):
                owner.handle(self, None)

            def do_POST(self):
                owner.handle(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def paths(self):
        return [path for _method, path, _body, _headers in self.seen]

    def handle(self, request, body):
        with self._lock:
            self.seen.append((request.command, request.path, body, dict(request.headers)))
        if request.path == "/ready" and not self.has_ready:
            return self.reply(request, 404, {"detail": "Not Found"})
        if request.path in ("/health", "/ready"):
            return self.reply(request, 200 if self.up else 503, "")
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return self.reply(request, 401, {"error": "Unauthorized"})
        if request.path == "/v1/models":
            if self.names is None:
                return self.reply(request, 404, {"detail": "Not Found"})
            return self.reply(request, 200, {"data": [{"id": name} for name in self.names]})
        if request.path == "/model_info":
            return self.reply(request, 200, {"model_path": "/models/kimi"})
        with self._lock:
            self._running += 1
            self.at_once = max(self.at_once, self._running)
        time.sleep(self.delay)
        try:
            return self.generate(request, body)
        finally:
            with self._lock:
                self._running -= 1

    def generate(self, request, body):
        if self.drop:
            request.close_connection = True
            return request.connection.close()
        if self.body is not None or self.status != 200:
            return self.reply(
                request, self.status, self.body if self.body is not None else {"error": {"message": "boom"}}
            )
        if request.path == "/v1/completions":
            if self.refuses_ignore_eos and "ignore_eos" in body:
                return self.reply(request, 400, {"error": {"message": "unknown field: ignore_eos"}})
            return self.reply(request, 200, {"usage": {"completion_tokens": body["max_tokens"]}})
        tokens = body["sampling_params"]["max_new_tokens"] - self.short
        info = {"completion_tokens": tokens, "finish_reason": {"type": "length"}}
        if self.accept:
            info |= {"spec_accept_length": self.accept, "spec_verify_ct": max(1, round(tokens / self.accept))}
        return self.reply(request, 200, {"text": "x" * tokens, "meta_info": info})

    @staticmethod
    def reply(request, status, body):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)
