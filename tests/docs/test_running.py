"""The commands and Python examples of the pages are run, in a folder that has the files they name.

Sizes are made small, places and ports are this test's own. What needs the model, and what starts vLLM, is in
the long runs (`make soak`); what needs a service of somebody else (S3) is parsed by `test_docs.py` alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.docs.pages import FENCE, PAGES, ROOT, command_lines, fences, name_of, shell_lines
from tests.service.running import environ

from tiercel import cli
from tiercel.tiers.files import FilesTier

# How a command is run, by its name.
HERE = {
    "size", "plan", "simulate", "migrate", "config",
    "cache ls", "cache verify", "cache clear", "cache copy",
}  # fmt: skip
DAEMON = {"daemon", "daemon status"}
# Asked of a running `tiercel serve`.
SERVER = {"explain", *(f"cache {name}" for name in ("prefetch", "pin", "unpin", "demote", "drop"))}
# Only parsed here: the reason.
PARSED = {
    "demo": "tests/cli/test_demo.py runs it",
    "model-dir": "test_quickstart runs it",
    "cache warm": "tests/cli/test_cache_warm.py runs it, with a model",
    "dashboard": "tests/web runs it",
    "top": "test_top_as_the_pages_call_it, tests/cli",
    "doctor": "tests/cli runs it",
    "bench": "tests/bench runs it",
    "eval": "tests/eval runs it, with a model",
    "serve": "with the demo model: test_quickstart; with vLLM: its commands are printed here",
}
# The shape of Llama 3.1 8B.
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
ELSEWHERE = re.compile(r"^(s3|gs|az|mooncake|valkeys?|rediss?)://")


def kind(words: Sequence[str]) -> str:
    """The command's name, with its subcommand where that has a row above."""
    names = [word for word in words if not word.startswith("-")]
    two = " ".join(words[:2])
    if words[0] == "daemon" and "status" in names:
        return "daemon status"
    return two if two in HERE | SERVER | PARSED.keys() else words[0]


def fit(words: Sequence[str], folder: Path) -> list[str]:
    """The same command for this folder: places in it, and sizes that any machine has."""
    swaps = (
        (r"^(ram\.size=).*", r"\g<1>2MiB"),
        (r"(tiers\.\d\.path=)?/var/cache/([\w-]+)", rf"\g<1>{folder}/\g<2>"),
        (r"^/etc/tiercel.toml$", f"{folder}/tiercel.toml"),
        (r"^/run/tiercel/s$", f"{folder}/s"),
        (r"^127\.0\.0\.1:\d+$", "127.0.0.1:0"),
        (r"^\d{5,}$", "1000"),
    )
    # The folder has the file already.
    out = [words[0], "--force", *words[1:]] if words[0] == "migrate" and "-o" in words else list(words)
    for find, put in swaps:
        out = [re.sub(find, put, word) for word in out]
    return out


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with the files that the pages speak of, made the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for place in ("tiercel", "tiercel-old", "kv-cache", "objects"):
        FilesTier(tmp_path / place).close()
    (tmp_path / "tiercel.toml").write_text(
        f'[ram]\nsize = "2MiB"\n[[tiers]]\npath = "{tmp_path}/tiercel"\nsize = "64MiB"\n'
        f'[[tiers]]\npath = "{tmp_path}/objects"\nsize = "64MiB"\n'
    )
    (tmp_path / "lmcache.yaml").write_text("max_local_cpu_size: 60\nlocal_disk: /var/cache/lmcache\n")
    (tmp_path / "token").write_text("a-token-of-some-length\n")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert cli.run(["simulate", "synth", "--requests", "300", "-o", "trace.jsonl"]) == 0
    capsys.readouterr()
    return tmp_path


def all_commands() -> Iterator[tuple[Path, list[str]]]:
    """Every `tiercel` command of the pages, once."""
    seen = set()
    for page in PAGES:
        for words in command_lines(page):
            synopsis = any(word.startswith("[") for word in words)
            if words and not synopsis and not words[0].startswith("-") and tuple(words) not in seen:
                seen.add(tuple(words))
                yield page, words


COMMANDS = list(all_commands())


def of(kinds: set[str]) -> list[list[str]]:
    synopsis = re.compile(r"[A-Z]{3,}$|^(OLD|NEW|SRC|DST|MODEL|TRACE|PLACE)$")
    return [
        words
        for _, words in COMMANDS
        if kind(words) in kinds and not any(synopsis.match(w) or ELSEWHERE.match(w) for w in words)
    ]


def test_it_is_known_how_every_command_is_run() -> None:
    assert {kind(words) for _, words in COMMANDS} <= HERE | DAEMON | SERVER | PARSED.keys()
    assert set(cli.COMMANDS) <= {name.split()[0] for name in HERE | DAEMON | SERVER | PARSED.keys()}
    assert len(of(HERE)) > 15


@pytest.mark.parametrize("words", of(HERE), ids=" ".join)
def test_a_command_runs(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(fit(words, folder)) == 0, capsys.readouterr().err
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make setup VLLM=cpu)")
@pytest.mark.parametrize("words", [w for w in of({"serve"}) if "vllm" in w], ids=" ".join)
def test_commands_for_vllm_can_be_built(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = words.index("--") if "--" in words else len(words)
    printed = [] if "--print-command" in words else ["--print-command"]
    # Port 0: nothing else may listen at the one of the page while it asks for it.
    fitted = fit([words[0], "--port", "0", *words[1:at], *printed, *words[at:]], folder)
    assert cli.run(fitted) == 0, capsys.readouterr().err
    assert "TiercelConnector" in capsys.readouterr().out


@contextmanager
def started(words: Sequence[str], folder: Path, ready: str) -> Iterator[str]:
    """`tiercel` with these words in the background; the line that begins with `ready`. Ended at the end."""
    with (folder / "stderr").open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tiercel", *words],
            stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder, env=environ(),
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith(ready)), None)
        assert line is not None, (folder / "stderr").read_text()
        yield line.strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, (folder / "stderr").read_text()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize("words", of({"daemon"}), ids=" ".join)
def test_a_daemon_starts_and_can_be_asked(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted = fit(words, folder)
    with started(fitted, folder, "serving on ") as line:
        socket = line.removeprefix("serving on ").split()[0].rstrip(",")
        assert cli.run(["daemon", "--socket", socket, "status"]) == 0, capsys.readouterr().err


def test_the_daemons_status_as_the_pages_ask_for_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [words for words in of({"daemon status"}) if "--socket" in words]
    assert asked
    for words in asked:
        fitted = fit(words, folder)
        socket = fitted[fitted.index("--socket") + 1]
        with started(["daemon", "--socket", socket, "--set", "ram.size=2MiB"], folder, "serving on "):
            assert cli.run(fitted) == 0, capsys.readouterr().err


def test_top_as_the_pages_call_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [fit(words, folder) for words in of({"top"}) if "--socket" in words]
    assert asked
    for words in asked:
        socket = words[words.index("--socket") + 1]
        with started(["daemon", "--socket", socket, "--set", "ram.size=2MiB"], folder, "serving on "):
            assert cli.run([*words, "--once"]) == 0, capsys.readouterr().err
            assert socket in capsys.readouterr().out


# ---- Python


def python_examples() -> list[tuple[str, str]]:
    return [(name_of(page), text) for page in PAGES for text in fences(page, "python", "py")]


def needs(text: str) -> str:
    """What an example needs to run: nothing, a server, or the model."""
    return "server" if "base_url" in text else "model" if "open_engine" in text else "nothing"


@pytest.mark.parametrize(
    ("page", "text"),
    [one for one in python_examples() if needs(one[1]) == "nothing"],
    ids=lambda one: one[:40],
)
def test_an_example_in_python_runs(page: str, text: str, folder: Path) -> None:
    exec(compile(text, page, "exec"), {})


@pytest.mark.soak
@pytest.mark.model
def test_examples_with_a_model_run(folder: Path, model_dir: Path) -> None:
    # Of translations one is enough.
    texts = {re.sub(r"  # .*", "", text) for _, text in python_examples() if needs(text) == "model"}
    assert texts
    for text in texts:
        out = python(text, folder)
        first, second = (int(found) for found in re.findall(r"^(\d+) \{", out, re.MULTILINE))
        assert second > 2000, out
        assert first in (0, second)


def python(text: str, folder: Path, *args: str) -> str:
    (folder / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", text, *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env=environ(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- with a server


def at_port(text: str, port: str) -> str:
    return text.replace("127.0.0.1:8000", f"127.0.0.1:{port}")


def port_of(line: str) -> str:
    found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
    assert found is not None, line
    return found[1]


@pytest.mark.soak
@pytest.mark.model
def test_what_pages_ask_of_a_server_is_answered(
    folder: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "document.txt").write_bytes((ROOT / "LICENSE").read_bytes())
    (folder / "conversation.json").write_text(
        '[{"role": "user", "content": "What is the capital of France?"}]'
    )
    # As pages call it.
    serve = ["serve", "--ram", "1GiB", "--port", "0", "--name", "my-model"]
    asked = 0
    with started(serve, folder, "serving ") as line:
        port = port_of(line)
        for page in [page for page in PAGES if "quickstart" not in page.name and "README" not in page.name]:
            for match in FENCE.finditer(page.read_text("utf-8")):
                language, text = match[1], match[2]
                if language == "python" and needs(text) == "server":
                    python(at_port(text, port), folder)
                    asked += 1
                for command in shell_lines(language, text) if language == "console" else ():
                    if command.startswith("curl http://127.0.0.1:8000/v1"):
                        command = at_port(command, port)
                        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
                        assert '"error"' not in done.stdout, done.stdout
                        asked += 1
        # With a socket it is a daemon that is asked: tests/cli/test_steering.py.
        for words in [one for one in of(SERVER) if "--socket" not in one]:
            words = [at_port(word, port) for word in words]
            if "--url" not in words:
                words += ["--url", f"http://127.0.0.1:{port}"]
            assert cli.run(words) == 0, (words, capsys.readouterr().err)
            asked += 1
    assert asked > 8


# ---- the quick start, as it stands on its page


def block_after(page: str, start: str, language: str) -> str:
    """The first code block in `language` after the text `start`."""
    rest = page[page.index(start) :]
    found = re.search(rf"^```{language}\n(.*?)^```", rest, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def first_token_s(out: str) -> float:
    found = re.search(r"first token after ([\d.]+) s", out)
    assert found is not None, out
    return float(found[1])


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("section", ["## vLLM\n", "## A server on transformers\n"])
def test_quickstart(section: str, folder: Path, model_dir: Path) -> None:
    """Both servers of docs/quickstart.md: computed, reused, and reused after a restart."""
    if "vLLM" in section:
        pytest.importorskip("vllm")
    page = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    ask = block_after(page, "`ask.py`", "python")
    words = shlex.split(next(shell_lines("console", block_after(page, section, "console"))))[1:]
    words = [words[0], "--port", "0", *words[1:]]
    times = []
    for _ in range(2):
        with started(words, folder, "serving ") as line:
            port = port_of(line)
            times.append(first_token_s(python(ask, folder, port)))
            times.append(first_token_s(python(ask, folder, port)))
            time.sleep(1)
    cold, again, restarted, _ = times
    assert again < cold / 3, times
    assert restarted < cold / 2, times
    assert os.listdir(folder / "kv-cache")
