"""What an engine's /metrics say of the present moment."""

from __future__ import annotations

import http.server
import threading

from dflash_fleet import metrics

# As SGLang 0.5.23 writes them, of eight ranks in two data-parallel groups; only the first rank of each group speaks.
TWO_GROUPS = """
# HELP sglang:gen_throughput The generation throughput (token/s).
# TYPE sglang:gen_throughput gauge
sglang:gen_throughput{dp_rank="0",model_name="a {b} c",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 500.25
sglang:gen_throughput{dp_rank="1",model_name="a {b} c",moe_ep_rank="4",pp_rank="0",tp_rank="4"} 100.0
sglang:spec_accept_length{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 3.0
sglang:spec_accept_length{dp_rank="1",model_name="m",pp_rank="0",tp_rank="4"} 0.0
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="1",model_name="m",pp_rank="0",tp_rank="4"} 1.0
sglang:num_running_reqs_offline_batch{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 99.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} NaN
"""
# With --enable-metrics-for-all-schedulers every rank speaks of the same engine.
ALL_RANKS = "\n".join(f'sglang:gen_throughput{{model_name="m",pp_rank="0",tp_rank="{rank}"}} 80.5' for rank in (1, 0))


def test_data_parallel_engines_add_up():
    assert metrics.live(TWO_GROUPS) == {
        "tokens_per_second": 600.25, "accept_length": 3.0, "running": 4.0, "queued": None,
        "requests": None, "aborted": None,
    }  # fmt: skip


def test_ranks_of_one_engine_do_not():
    assert metrics.live(ALL_RANKS)["tokens_per_second"] == 80.5


def test_an_engine_without_a_drafter_has_no_accept_length():
    assert metrics.live(ALL_RANKS)["accept_length"] is None
    assert metrics.live("")["tokens_per_second"] is None


class Handler(http.server.BaseHTTPRequestHandler):
    """/metrics of an engine, 404 for one without."""

    answer = (200, TWO_GROUPS)

    def do_GET(self):
        status, text = self.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        """Quiet."""


def test_an_engine_is_asked_and_one_that_does_not_tell_says_so():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    try:
        assert metrics.ask("127.0.0.1", port)["tokens_per_second"] == 600.25
        Handler.answer = (404, "no")
        assert metrics.ask("127.0.0.1", port) == {"error": "GET /metrics: status 404"}
    finally:
        server.shutdown()
        server.server_close()
    assert "cannot connect" in metrics.ask("127.0.0.1", port)["error"]
