"""`tiercel serve` as people use it: a process of its own, the real model, the official client."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .conftest import ServerProcess

pytestmark = pytest.mark.model
BLOCK = 32
SECRET = "kumquat"
LONG = (
    f"My favourite fruit is the {SECRET}. "
    + "It grows on small trees and is eaten whole, with its peel. " * 8
)
OPTIONS = (
    "--name", "smol", "--ram", "256MiB", "--disk-size", "1GB",
    "--set", f"model.block_tokens={BLOCK}", "--set", "serve.queue_requests=1",
)  # fmt: skip
# Greedy, it goes on counting for as long as it may.
COUNT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25,"


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not true():
        assert time.monotonic() < give_up, "waited 60 s for what never came"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("serve")
    with ServerProcess(
        str(model_dir), *OPTIONS, "--disk", str(folder / "kv"), "--log-format", "json", log=folder / "log"
    ) as one:
        yield one
        assert one.end() == 0


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with client_of(server) as one:
        yield one


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def chat(client: openai.OpenAI, messages: list[Any], salt: str | None = None, tokens: int = 8) -> Any:
    more = {"extra_body": {"cache_salt": salt}} if salt else {}
    return client.chat.completions.create(
        model="smol", messages=messages, temperature=0, max_tokens=tokens, **more
    )


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_it_says_once_what_it_serves_where_and_how(server: ServerProcess) -> None:
    assert sum("serving smol (cpu, bfloat16) at http://127.0.0.1:" in line for line in server.said) == 1
    assert any(line.split() == ["ram.size", "=", "256MiB", "(flag)"] for line in server.said)
    assert server.health() == {"status": "ok", "model": "smol", "waiting": 0, "running": 0}


def test_the_dashboard_shows_what_happened_and_its_buttons_act(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    messages: list[Any] = [{"role": "user", "content": f"What is seen? {LONG}"}]
    before = httpx.get(f"{server.url}/v1/overview").json()["stats"]["requests"]
    chat(client, messages)
    answer = chat(client, messages)
    assert cached(answer) > 0
    text = httpx.get(f"{server.url}/v1/overview").text
    requests = json.loads(text)["stats"]["requests"]
    assert requests["requests"] == before["requests"] + 2
    reused = sum(requests["reused_tokens"].values()) - sum(before["reused_tokens"].values())
    assert reused == cached(answer)
    assert SECRET not in text
    assert "text/html" in httpx.get(f"{server.url}/").headers["content-type"]
    (line,) = [line for line in server.said if "token for its buttons" in line]
    right = {"Authorization": f"Bearer {line.split(': ')[1].rstrip(')')}"}
    until(lambda: bool(httpx.get(f"{server.url}/v1/overview").json()["prefixes"]))  # it is kept for a moment
    told = httpx.get(f"{server.url}/v1/overview").json()
    assert told["scopes"][0]["model"]
    body = {"prefix": told["prefixes"][0]["prefix"], "ttl": "1s"}
    assert httpx.post(f"{server.url}/v1/cache/pin", json=body).status_code == 401
    assert httpx.post(f"{server.url}/v1/cache/pin", json=body, headers=right).json()["done"] > 0


def test_a_second_turn_reuses_the_first_and_its_answer(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": LONG + "What do I like?"}]
    first = chat(client, messages, tokens=40)
    usage = first.usage
    assert cached(first) == 0
    assert usage.prompt_tokens > BLOCK
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert first.choices[0].finish_reason in ("stop", "length")
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And why?"},
    ]
    second = chat(client, messages)
    assert cached(second) >= usage.prompt_tokens // BLOCK * BLOCK > 0


def test_a_stream_gives_the_same_text_and_its_usage(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    whole = chat(client, messages, tokens=12)
    stream = client.chat.completions.create(
        model="smol", messages=messages, temperature=0, max_tokens=12, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert cached(chunks[-1]) == whole.usage.prompt_tokens // BLOCK * BLOCK > 0


def test_one_salt_never_sees_what_another_stored(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Nobody else knows. " + LONG + "Which fruit?"}]
    first = chat(client, messages, salt="tenant a")
    again = chat(client, messages, salt="tenant a")
    assert cached(first) == 0
    assert cached(again) > 0, "the control: under its own salt it is reused"
    for other in ("tenant b", "tenant a ", None):
        cold = chat(client, messages, salt=other)
        assert cold.choices[0].message.content == first.choices[0].message.content
        assert cached(cold) == 0


def test_completions_take_text_and_tokens(client: openai.OpenAI) -> None:
    text = client.completions.create(model="smol", prompt=COUNT, temperature=0, max_tokens=8)
    assert text.choices[0].text.startswith(" 26, 27")
    assert text.choices[0].finish_reason == "length"
    stopped = client.completions.create(
        model="smol", prompt=COUNT, temperature=0, max_tokens=16, stop=[" 27"]
    )
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" 26,", "stop")
    tokens = client.completions.create(model="smol", prompt=[1, 2, 3, 4], temperature=0, max_tokens=3)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 4
    pieces = client.completions.create(model="smol", prompt=COUNT, temperature=0, max_tokens=8, stream=True)
    assert "".join(one.choices[0].text for one in pieces) == text.choices[0].text


def test_a_seed_repeats_a_sampled_answer(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        drawn = client.completions.create(
            model="smol", prompt="Once upon a time", temperature=1.0, top_p=0.95, max_tokens=12, seed=seed
        )
        return drawn.choices[0].text

    texts = [draw(seed) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1, "the control: other seeds say something else"


def test_mistakes_arrive_as_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="n is 2; accepted is 1"):
        client.chat.completions.create(model="smol", messages=[{"role": "user", "content": "x"}], n=2)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smol", prompt=[5] * 8192)
    assert caught.value.code == "context_length_exceeded"
    assert [one.id for one in client.models.list()] == ["smol"]
    assert client.models.retrieve("smol").id == "smol"


def test_a_full_queue_is_refused_and_everyone_else_served(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    waiting: list[Any] = []
    with client.completions.create(
        model="smol", prompt=COUNT, temperature=0, max_tokens=2000, stream=True
    ) as running:
        next(iter(running))
        thread = threading.Thread(
            target=lambda: waiting.append(chat(client, [{"role": "user", "content": "Hi"}], tokens=2))
        )
        thread.start()
        until(lambda: server.health() == {"status": "ok", "model": "smol", "waiting": 1, "running": 1})
        with pytest.raises(openai.RateLimitError) as caught:
            chat(client, [{"role": "user", "content": "Hello"}])
        assert caught.value.code == "queue_full"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    thread.join(60)
    assert waiting[0].usage.completion_tokens <= 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_answer_and_leaves_no_lease(
    server: ServerProcess, stream: bool
) -> None:
    until(lambda: server.health()["running"] == 0)
    before = server.figures()
    body = {"prompt": COUNT, "temperature": 0, "max_tokens": 2000, "stream": stream}
    with httpx.Client() as browser:
        if stream:
            with browser.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                next(response.iter_raw())
        else:
            # No timing is asserted: the answer takes minutes, the client has none.
            with pytest.raises(httpx.ReadTimeout):
                browser.post(f"{server.url}/v1/completions", json=body, timeout=2)
    name = 'tiercel_http_cut_requests_total{reason="disconnect"}'
    until(lambda: server.figures()[name] == before[name] + 1)
    until(lambda: server.health()["running"] == 0)
    after = server.figures()
    assert after["tiercel_store_leases"] == 0
    assert after["tiercel_http_generated_tokens_total"] == before["tiercel_http_generated_tokens_total"]


def test_no_prompt_and_no_answer_is_in_the_log(server: ServerProcess, client: openai.OpenAI) -> None:
    answer = chat(client, [{"role": "user", "content": LONG}], tokens=12).choices[0].message.content
    until(lambda: "first token after" in server.log.read_text())
    log = server.log.read_text()
    assert SECRET not in log
    assert answer not in log
    assert "Traceback" not in log


def test_the_log_is_json_and_has_a_line_for_each_request(server: ServerProcess) -> None:
    body = {"prompt": COUNT, "max_tokens": 3, "temperature": 0}
    for _ in range(2):
        answer = httpx.post(
            f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "mine"}, timeout=60
        )
        assert answer.headers["x-request-id"] == "mine"
    until(lambda: server.log.read_text().count('"request_id": "mine"') == 2)
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    last = [one for one in lines if one.get("request_id") == "mine"][-1]
    usage = answer.json()["usage"]
    assert (last["prompt_tokens"], last["answer_tokens"]) == (usage["prompt_tokens"], 3)
    assert last["reused"] == {"ram": usage["prompt_tokens_details"]["cached_tokens"]}
    assert last["reused_tokens"] > 0
    answered = server.figures()['tiercel_http_requests_total{endpoint="/v1/completions",status="200"}']
    told = [one for one in lines if (one.get("endpoint"), one.get("status")) == ("/v1/completions", 200)]
    assert len(told) == answered


def test_sigterm_writes_down_and_a_restart_resumes_from_disk(model_dir: Path, tmp_path: Path) -> None:
    options = (str(model_dir), *OPTIONS, "--disk", str(tmp_path / "kv"))
    messages: list[Any] = [{"role": "user", "content": LONG + "What do I like?"}]
    with ServerProcess(*options, log=tmp_path / "log1") as server, client_of(server) as client:
        cold = chat(client, messages)
        assert cached(cold) == 0
        with client.completions.create(
            model="smol", prompt=COUNT, temperature=0, max_tokens=30, stream=True
        ) as stream:
            chunks = iter(stream)
            next(chunks)
            server.process.terminate()
            rest = list(chunks)
        assert rest[-1].choices[0].finish_reason == "length", "the running answer was finished"
        # Asked once: a second signal would cut the writing short.
        assert server.process.wait(60) == 0
    everywhere = ("--host", "0.0.0.0", "--batch", "2")
    with ServerProcess(*options, *everywhere, log=tmp_path / "log2") as server, client_of(server) as client:
        warm = chat(client, messages)
        assert any(line.split() == ["model.batch", "=", "2", "(flag)"] for line in server.said)
        assert cached(warm) == cold.usage.prompt_tokens // BLOCK * BLOCK > 0
        assert warm.choices[0].message.content == cold.choices[0].message.content
        until(lambda: 'tiercel_reused_tokens_total{place="disk"}' in server.figures())
        assert server.figures()['tiercel_reused_tokens_total{place="disk"}'] == cached(warm)
        assert server.end() == 0
    assert "no authentication" in (tmp_path / "log2").read_text()
    assert "no authentication" not in (tmp_path / "log1").read_text()


def failing(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tiercel", "serve", "--engine", "transformers", *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_what_cannot_be_served_is_one_line(server: ServerProcess, tmp_path: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in failing("--port", port)
    assert f"model folder {tmp_path} has no config.json" in failing(str(tmp_path), "--port", "0")
    assert "accepted is one of them" in failing(str(tmp_path), "--model", "other")
    assert "ram.size" in failing("--ram", "4")
    assert "model.batch: '0'" in failing("--batch", "0")
