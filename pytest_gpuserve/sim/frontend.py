"""The HTTP API: routes, keys, and what the server says of itself."""

from __future__ import annotations

import asyncio
import hmac
import os
import time
import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.sim import SGLANG_VERSION
from pytest_gpuserve.sim.metrics import metrics_text
from pytest_gpuserve.sim.protocol import ProtocolError, body_of, chat, completions, generate

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpuserve.sim.config import Config
    from pytest_gpuserve.sim.http import Exchange
    from pytest_gpuserve.sim.logs import Log
    from pytest_gpuserve.sim.requests import Engine

__all__ = ["Frontend"]

# No key is needed for these, so that probes and Prometheus work without a secret (SGLang's utils/auth.py).
_OPEN = ("/health", "/ready", "/metrics")


class Frontend:
    """Answers requests. `status` is SGLang's: Starting, Up or UnHealthy; `draining` after SIGTERM."""

    def __init__(self, config: Config, engine: Engine, log: Log) -> None:
        self.config = config
        self.engine = engine
        self.status = "Starting"
        self.draining = False
        self.startup_seconds = 0.0
        self._log = log
        self._key = config.args["api_key"]
        self._tasks: set[asyncio.Task[None]] = set()
        self._routes: dict[str, tuple[frozenset[str], Callable[[Exchange], None]]] = {}
        for paths, methods, handler in (
            ("/health /health_generate", "GET", self._health),
            ("/ready", "GET", self._ready),
            ("/ping", "GET", self._ping),
            ("/", "GET HEAD", lambda exchange: exchange.json("SGLang is running")),
            ("/model_info /get_model_info", "GET", self._model_info),
            ("/server_info /get_server_info", "GET", self._server_info),
            ("/v1/models", "GET", self._models),
            ("/v1/loads", "GET", self._loads),
            ("/get_load", "GET", self._load),
            ("/flush_cache", "GET POST", self._flush),
            ("/freeze_gc", "GET POST", lambda exchange: exchange.answer(200)),
            ("/abort_request", "POST", self._abort),
            ("/generate", "POST PUT", lambda exchange: generate(self.engine, exchange)),
            ("/v1/completions", "POST", lambda exchange: completions(self.engine, exchange)),
            ("/v1/chat/completions", "POST", lambda exchange: chat(self.engine, exchange)),
        ):
            for path in paths.split():
                self._routes[path] = (frozenset(methods.split()), handler)
        if config.args["enable_metrics"]:
            self._routes["/metrics"] = (frozenset({"GET"}), self._metrics)

    def handle(self, exchange: Exchange) -> None:
        """One request: key, route, method, handler."""
        if not self._allowed(exchange):
            exchange.json({"error": "Unauthorized"}, 401)
            return
        methods, handler = self._routes.get(exchange.path, (frozenset(), None))
        if handler is None:
            exchange.json({"detail": "Not Found"}, 404)
        elif exchange.method not in methods:
            exchange.answer(405, b'{"detail":"Method Not Allowed"}', allow=", ".join(sorted(methods)))
        else:
            try:
                handler(exchange)
            except ProtocolError as error:
                exchange.json(error.body, error.status)
            except Exception:  # noqa: BLE001 - one bad request never ends the server
                self._log.line(f"Exception in ASGI application\n{traceback.format_exc()}")
                exchange.answer(500, b"Internal Server Error", "text/plain; charset=utf-8")

    def _allowed(self, exchange: Exchange) -> bool:
        if not self._key or exchange.method == "OPTIONS" or exchange.path.startswith(_OPEN):
            return True
        scheme, _, token = exchange.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), str(self._key).encode())

    def _ready(self, exchange: Exchange) -> None:
        exchange.answer(200 if self.status == "Up" and not self.draining else 503)

    def _ping(self, exchange: Exchange) -> None:
        exchange.answer(200 if self.status == "Up" else 503)

    def _health(self, exchange: Exchange) -> None:
        """503 while it starts or drains; else a token is generated, which takes a second or more, as SGLang's does."""
        if self.draining:
            self._log.line("Health check request received during shutdown. Returning 503.")
        if self.draining or self.status == "Starting":
            exchange.answer(503)
            return
        if os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "1").lower() in ("0", "false"):
            exchange.answer(200)
            return
        task = asyncio.get_running_loop().create_task(self._health_generate(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _health_generate(self, exchange: Exchange) -> None:
        limit = float(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20"))
        begun = time.strftime("%H:%M:%S")
        _, answered = await asyncio.gather(asyncio.sleep(min(1.0, limit)), self.engine.ring.ping(limit))
        self.status = "Up" if answered else "UnHealthy"
        if not answered:
            self._log.line(
                f"Health check failed. Server couldn't get a response from detokenizer for last {limit:.0f} seconds. "
                f"tic start time: {begun}. last_heartbeat time: {begun}"
            )
        exchange.answer(200 if answered else 503)

    def _deprecated(self, exchange: Exchange) -> None:
        if exchange.path.startswith("/get_"):
            self._log.line(
                f"Endpoint '{exchange.path}' is deprecated and will be removed in a future version. "
                f"Please use '/{exchange.path[5:]}' instead."
            )

    def _model_info(self, exchange: Exchange) -> None:
        self._deprecated(exchange)
        args, model = self.config.args, self.config.model
        names = ("tokenizer_path", "weight_version", "load_format", "reasoning_parser", "tool_call_parser")
        exchange.json(
            {
                "model_path": args["model_path"],
                "served_model_name": self.config.served_name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": model.get("model_type"),
                "architectures": [self.config.architecture],
                "simulated": True,
            }
            | {name: args[name] for name in names}
        )

    def _server_info(self, exchange: Exchange) -> None:
        self._deprecated(exchange)
        clock = self.engine.clock
        state = {
            **self.config.args,
            "last_gen_throughput": clock.throughput,
            "effective_max_running_requests_per_dp": self.config.args["max_running_requests"] or 2048,
            "memory_usage": {"token_capacity": self.config.capacity},
        }
        exchange.json(
            self.config.server_info()
            | {
                "startup_time": {"tokenizer_e2e": self.startup_seconds},
                "internal_states": [state],
                "simulation": {"tokens_per_second": clock.rate, "saturation": clock.saturation},
            }
        )

    def _models(self, exchange: Exchange) -> None:
        name = self.config.served_name
        card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "sglang", "root": name}
        exchange.json({"object": "list", "data": [card | {"parent": None, "max_model_len": self.config.context}]})

    def _core_load(self) -> dict[str, Any]:
        engine = self.engine
        used = sum(one.prompt_tokens + len(one.ids) for one in engine.busy)
        return {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": engine.running,
            "num_waiting_reqs": engine.queued,
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": self.config.capacity,
            "max_running_requests": self.config.args["max_running_requests"] or 2048,
            "token_usage": engine.usage,
            "gen_throughput": engine.clock.throughput,
        }

    def _loads(self, exchange: Exchange) -> None:
        exchange.json(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": SGLANG_VERSION,
                "accelerator": None,
                "num_accelerators": len(self.config.ranks),
                "loads": [self._core_load()],
            }
        )

    def _load(self, exchange: Exchange) -> None:
        """`/get_load`, which 0.5.10 had and 0.5.23 has not: kept for older clients."""
        engine = self.engine
        used = sum(one.prompt_tokens + len(one.ids) for one in engine.busy)
        exchange.json(
            [{"dp_rank": 0, "num_reqs": engine.running, "num_waiting_reqs": engine.queued, "num_tokens": used}]
        )

    def _flush(self, exchange: Exchange) -> None:
        if self.engine.flush():
            self._log.line("Cache flushed successfully!")
            text = (
                "Cache flushed.\nPlease check backend logs for more details. "
                "(When there are running or waiting requests, the operation will not be performed.)\n"
            )
            exchange.answer(200, text.encode(), None)
        else:
            exchange.answer(400, b"Flush cache failed.\n", None)

    def _abort(self, exchange: Exchange) -> None:
        body = body_of(exchange)
        if body.get("abort_all") or body.get("rid"):
            self.engine.abort(None if body.get("abort_all") else str(body["rid"]))
        exchange.answer(200)

    def _metrics(self, exchange: Exchange) -> None:
        exchange.answer(200, metrics_text(self.engine, self.startup_seconds).encode(), "text/plain; version=0.0.4")
