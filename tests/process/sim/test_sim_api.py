"""The HTTP API: SGLang 0.5.23's shapes (recorded from a real server), keys, errors, and exact rates."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from itertools import pairwise

import pytest

META = [
    "id",
    "finish_reason",
    "prompt_tokens",
    "weight_version",
    "num_retractions",
    "reasoning_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_versions",
    "cached_tokens_details",
    "dp_rank",
    "e2e_latency",
    "response_sent_to_client_ts",
]
USAGE = {"prompt_tokens_details": None, "reasoning_tokens": 0, "completion_tokens_details": None}


@pytest.fixture
def server(launch):
    return launch({"tokens-per-second": 2000}, "--enable-metrics").ready()


def test_generate(server):
    answer = server.generate((11, 12, 13), tokens=3)
    assert list(answer) == ["text", "output_ids", "meta_info"]
    assert list(answer["meta_info"]) == META
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 3, 0)
    assert len(answer["output_ids"]) == 3
    assert len(answer["text"].split()) == 3


def test_generate_streams_cumulative_text(server):
    body = {"input_ids": [11, 12, 13], "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
    events = server.stream("/generate", body)
    assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 5]
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * 4
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"
    for shorter, longer in pairwise(events):
        assert longer["text"].startswith(shorter["text"])
        assert longer["output_ids"][:-1] == shorter["output_ids"]
    whole = server.generate((11, 12, 13), tokens=5)
    assert (events[-1]["text"], events[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    middle = [key for key in META if key not in ("weight_versions", "e2e_latency", "response_sent_to_client_ts")]
    assert list(events[1]["meta_info"]) == list(events[2]["meta_info"]) == middle


def test_incremental_streams(launch):
    server = launch({}, "--incremental-streaming-output").ready()
    events = server.stream("/generate", {"text": "hello there", "sampling_params": {"max_new_tokens": 4}})
    whole = server.generate("hello there", tokens=4)
    assert "".join(event["text"] for event in events) == whole["text"]
    assert [event["output_ids"] for event in events] == [[token] for token in whole["output_ids"]]


def test_logprobs(server):
    more = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = server.generate((21, 22, 23, 24), tokens=3, **more)["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, 21, None]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [21, 22, 23, 24]
    assert meta["input_top_logprobs"][0] is None
    assert meta["output_token_logprobs_length"] == len(meta["output_token_logprobs"]) == 3
    for (logprob, token, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert top[0][:2] == [logprob, token]  # greedy: the likeliest
        assert top[1][0] < top[0][0] < 0
    late = server.generate((21, 22, 23, 24), tokens=1, return_logprob=True, logprob_start_len=3)["meta_info"]
    assert [entry[1] for entry in late["input_token_logprobs"]] == [24]
    none = server.generate((21, 22, 23, 24), tokens=1, return_logprob=True)["meta_info"]
    assert none["input_token_logprobs"] == []
    with_text = server.generate((21, 22), tokens=1, return_logprob=True, return_text_in_logprobs=True)
    assert with_text["meta_info"]["output_token_logprobs"][0][2] == with_text["text"]


def test_streamed_logprobs_are_the_same(server):
    body = {"input_ids": [31, 32], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
    events = server.stream("/generate", body)
    assert [len(event["meta_info"]["output_token_logprobs"]) for event in events] == [1, 2, 3]
    whole = server.generate((31, 32), tokens=3, return_logprob=True)["meta_info"]
    assert events[-1]["meta_info"]["output_token_logprobs"] == whole["output_token_logprobs"]


def test_sound_configurations_agree_within_noise_and_choose_the_same_tokens(launch):
    more = {"return_logprob": True, "logprob_start_len": 0}
    answers = {}
    for name, flags in {
        "triton": ("--attention-backend", "triton"),
        "graphs off": ("--attention-backend", "triton", "--disable-cuda-graph"),
        "flashinfer": ("--attention-backend", "flashinfer"),
        "fp8": ("--attention-backend", "triton", "--kv-cache-dtype", "fp8_e4m3"),
    }.items():
        answers[name] = launch({}, *flags).ready().generate(tuple(range(40, 70)), tokens=30, **more)

    def gaps(name: str, kind: str) -> list[float]:
        pairs = zip(answers["triton"]["meta_info"][kind], answers[name]["meta_info"][kind], strict=True)
        return [abs(a[0] - b[0]) for a, b in pairs if a[0] is not None]

    assert len({tuple(answer["output_ids"]) for answer in answers.values()}) == 1
    assert set(gaps("graphs off", "output_token_logprobs")) == {0}
    assert 0 < max(gaps("flashinfer", "input_token_logprobs")) <= 0.04
    assert set(gaps("fp8", "input_token_logprobs")) == {0}  # a fresh prompt never reads the KV cache
    assert sum(gaps("fp8", "output_token_logprobs")) > 1.5 * sum(gaps("flashinfer", "output_token_logprobs"))


def test_prefix_cache(server):
    prompt = tuple(range(100, 130))
    assert server.generate(prompt)["meta_info"]["cached_tokens"] == 0
    again = server.generate((*prompt, 5, 6))["meta_info"]
    assert (again["cached_tokens"], again["cached_tokens_details"]) == (30, {"device": 30, "host": 0})
    part = server.generate((*prompt, 5, 6), return_logprob=True, logprob_start_len=10)["meta_info"]
    assert part["cached_tokens"] == 10
    status, body = server.request("POST", "/flush_cache")
    assert (status, body[:15]) == (200, b"Cache flushed.\n")
    assert server.generate(prompt)["meta_info"]["cached_tokens"] == 0


def test_no_prefix_cache_with_the_radix_cache_off(launch):
    server = launch({}, "--disable-radix-cache").ready()
    server.generate((1, 2, 3, 4))
    assert server.generate((1, 2, 3, 4))["meta_info"]["cached_tokens"] == 0


def test_batches(server):
    sampling = {"max_new_tokens": 2, "temperature": 0}
    answers = server.post("/generate", {"input_ids": [[11, 12, 13], [8, 9]], "sampling_params": sampling})
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 2]
    assert answers[0]["output_ids"] == server.generate((11, 12, 13), tokens=2)["output_ids"]
    texts = server.post("/generate", {"text": ["a b", "c"], "sampling_params": [sampling, {"max_new_tokens": 5}]})
    assert [len(answer["output_ids"]) for answer in texts] == [2, 5]
    events = server.stream("/generate", {"input_ids": [[11, 12, 13], [8, 9]], "sampling_params": sampling})
    assert sorted(event["index"] for event in events) == [0, 0, 1, 1]
    last = {event["index"]: event["output_ids"] for event in events}
    assert [last[0], last[1]] == [answer["output_ids"] for answer in answers]


def test_completions(server):
    body = {"model": "m", "prompt": "hello world", "max_tokens": 3, "temperature": 0}
    answer = server.post("/v1/completions", body)
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage", "metadata"]
    assert (answer["object"], answer["model"]) == ("text_completion", "m")
    choice = answer["choices"][0]
    assert list(choice) == ["index", "text", "logprobs", "finish_reason", "matched_stop"]
    assert (choice["logprobs"], choice["finish_reason"]) == (None, "length")
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3} | USAGE
    events = server.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == choice["text"]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, "length"]
    assert (events[-1]["choices"], events[-1]["usage"]) == ([], answer["usage"])
    assert [event["choices"] for event in server.stream("/v1/completions", body)][-1] != []
    assert len(server.post("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 1})["choices"]) == 2
    assert server.post("/v1/completions", {"prompt": "x"})["usage"]["completion_tokens"] == 16
    logprobs = server.post("/v1/completions", body | {"logprobs": 2})["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


def test_chat(server):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    answer = server.post("/v1/chat/completions", body)
    assert answer["object"] == "chat.completion"
    message = answer["choices"][0]["message"]
    assert list(message) == ["role", "content", "reasoning_content"]
    events = server.stream("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert events[0]["choices"][0]["delta"] == {"reasoning_content": None, "role": "assistant", "content": ""}
    parts = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(parts) == message["content"]
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 3
    logprobs = server.post("/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 2})
    content = logprobs["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == message["content"]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]


def test_what_the_server_says_of_itself(launch):
    server = launch({"tokens-per-second": 77}, "--served-model-name", "small", "--kv-cache-dtype", "fp8_e4m3").ready()
    info = server.get("/server_info")
    assert (info["version"], info["simulated"], info["kv_cache_dtype"]) == ("0.5.23", True, "fp8_e4m3")
    assert info["simulation"]["tokens_per_second"] == 77
    assert info["internal_states"][0]["attention_backend"] == info["attention_backend"]
    assert server.get("/get_server_info")["port"] == server.port
    assert "Endpoint '/get_server_info' is deprecated" in server.log
    assert server.get("/model_info")["served_model_name"] == "small"
    assert server.get("/get_model_info")["model_path"] == "tiny"
    card = server.get("/v1/models")["data"][0]
    assert (card["id"], card["owned_by"], card["max_model_len"]) == ("small", "sglang", 32768)
    assert server.get("/v1/loads")["loads"][0]["num_running_reqs"] == 0
    assert server.get("/get_load")[0]["num_reqs"] == 0
    assert server.get("/") == "SGLang is running"
    assert server.request("GET", "/ping") == (200, b"")
    assert server.request("GET", "/metrics")[0] == 404  # without --enable-metrics


def test_the_model_is_read_from_its_config(launch, tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    server = launch({}, "--model-path", str(tmp_path)).ready()
    assert server.get("/model_info")["architectures"] == ["LlamaForCausalLM"]
    assert max(server.generate((511,), tokens=40)["output_ids"]) < 512
    status, body = server.request("POST", "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 100}})
    assert status == 400
    message = json.loads(body)["error"]["message"]
    assert message.startswith("Requested token count exceeds the model's maximum context length of 64 tokens.")
    events = server.stream("/generate", {"input_ids": [5] * 64, "sampling_params": {"max_new_tokens": 1}})
    assert events[0]["error"]["code"] == 400
    assert "longer than the model's context length (64 tokens)" in events[0]["error"]["message"]


def test_metrics_count_tokens_as_they_come(launch, wait_until):
    server = launch({"tokens-per-second": 20}, "--enable-metrics").ready()

    def count(name: str) -> float:
        lines = server.request("GET", "/metrics")[1].decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"sglang:{name}{{"))

    for stream in (False, True):
        before = count("generation_tokens_total")
        body = {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 40}, "stream": stream}
        client = threading.Thread(target=server.request, args=("POST", "/generate", body))
        client.start()
        wait_until(lambda was=before: was < count("generation_tokens_total") < was + 40, "a growing counter")
        assert count("num_running_reqs") == 1
        client.join()
        assert count("generation_tokens_total") == before + 40
    assert (count("prompt_tokens_total"), count("num_running_reqs"), count("num_requests_total")) == (4, 0, 2)


def test_key(launch):
    server = launch({}, "--api-key", "secret", "--enable-metrics").ready()
    for path in ("/ready", "/health", "/metrics"):
        assert server.request("GET", path)[0] == 200
    for method, path in (("GET", "/model_info"), ("POST", "/generate"), ("GET", "/v1/models"), ("GET", "/nope")):
        assert server.request(method, path) == (401, b'{"error":"Unauthorized"}')
        assert server.request(method, path, Authorization="Bearer wrong")[0] == 401
    assert server.request("GET", "/model_info", Authorization="Bearer secret")[0] == 200
    assert server.request("GET", "/nope", Authorization="bearer secret")[0] == 404
    assert "secret" not in server.log


def test_refusals(server):
    assert server.request("GET", "/nope") == (404, b'{"detail":"Not Found"}')
    assert server.request("POST", "/health") == (405, b'{"detail":"Method Not Allowed"}')
    assert server.request("GET", "/generate")[0] == 405
    for body, words in (
        ({"sampling_params": {}}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": [99999999]}, "greater than the vocab size"),
        ({"input_ids": ["a", 1]}, "a prompt is text, a list of token ids, or a list of either"),
        ({"input_ids": [5], "sampling_params": 7}, ""),
    ):
        status, data = server.request("POST", "/generate", body)
        assert status == 400
        assert words in json.loads(data)["error"]["message"]
    for path, body in (("/generate", b"nojson"), ("/v1/completions", {"model": "m"}), ("/v1/chat/completions", {})):
        status, data = server.request("POST", path, body)
        assert (status, json.loads(data)["object"]) == (400, "error")
    assert server.generate()["output_ids"]


def test_bad_http_is_refused_and_harms_nobody(server):
    # The last is refused with its last byte: a server that closes over unread bytes resets the connection.
    long = b"x" * ((64 << 10) + 1)
    for raw in (b"hello\r\n\r\n", b"POST /generate HTTP/1.1\r\ncontent-length: x\r\n\r\n", long):
        with socket.create_connection(("127.0.0.1", server.port), 10) as client:
            client.sendall(raw)
            assert client.recv(100).startswith(b"HTTP/1.1 4")
    assert server.generate()["output_ids"]


def test_connections_are_kept_and_pipelined_requests_answered_in_order(server):
    with socket.create_connection(("127.0.0.1", server.port), 10) as client:
        client.sendall(
            b"GET /ready HTTP/1.1\r\n\r\nGET /nope HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nConnection: close\r\n\r\n"
        )
        data = b""
        while part := client.recv(65536):
            data += part
    assert re.findall(rb"HTTP/1\.1 (\d+)", data) == [b"200", b"404", b"200"]


def test_abort_ends_a_request_with_what_it_has(launch, wait_until):
    server = launch({"tokens-per-second": 50}).ready()
    answers: list[list] = []
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 3000}, "rid": "mine"}
    client = threading.Thread(target=lambda: answers.append(server.stream("/generate", body)))
    client.start()
    wait_until(lambda: server.get("/get_load")[0]["num_tokens"] > 3, "tokens")
    assert server.request("POST", "/flush_cache")[0] == 400
    server.request("POST", "/abort_request", {"rid": "other"})
    assert server.get("/get_load")[0]["num_reqs"] == 1
    server.request("POST", "/abort_request", {"rid": "mine"})
    client.join(30)
    last = answers[0][-1]
    assert last["meta_info"]["id"] == "mine"
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 1 <= last["meta_info"]["completion_tokens"] < 3000


def test_a_client_that_leaves_frees_its_place(launch, wait_until):
    server = launch({"tokens-per-second": 20}, "--max-running-requests", "1").ready()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    body = json.dumps({"input_ids": [5], "sampling_params": {"max_new_tokens": 9000}, "stream": True})
    connection.request("POST", "/generate", body)
    response = connection.getresponse()
    waiting = threading.Thread(target=server.generate)
    waiting.start()
    wait_until(lambda: server.get("/get_load")[0]["num_waiting_reqs"] == 1, "one queued")
    response.close()
    connection.close()
    waiting.join(30)
    assert not waiting.is_alive()


def test_health_generates_and_takes_a_second(server):
    began = time.monotonic()
    assert server.request("GET", "/health") == (200, b"")
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize(("streams", "rate", "tokens"), [(1, 100, 100), (32, 50, 40)])
def test_streams_get_the_exact_rate(launch, streams, rate, tokens):
    server = launch({"tokens-per-second": rate}).ready()
    spent: list[float] = []

    def client() -> None:
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": tokens}, "stream": True}
        began = time.monotonic()
        assert server.request("POST", "/generate", body)[0] == 200
        spent.append(time.monotonic() - began)

    # Never early; the fastest of all shows no drift, whatever the machine does to the others.
    exact = tokens / rate
    for turn in range(1, 6):
        threads = [threading.Thread(target=client) for _ in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(spent) == turn * streams
        if min(spent) < exact * 1.05:
            break
    assert exact <= min(spent) < exact * 1.05
