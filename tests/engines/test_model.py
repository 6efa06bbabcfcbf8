"""Folders that cannot be run end as one line that names the folder and what is wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tiercel.engines.transformers import model
from tiercel.engines.transformers.model import load_model
from tiercel.errors import ModelError


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def refused(folder: Path, **how: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(folder, **{"device": "cpu"} | how)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 600
    return line


def test_a_good_folder_loads(folder: Path) -> None:
    loaded = load_model(folder, device="cpu")
    assert len(loaded.shapes) == 3
    assert (loaded.context_tokens, loaded.vocab_tokens, loaded.eos_ids) == (512, 128, {1})
    assert loaded.dtype == loaded.kv_dtype == torch.float32


def test_missing_folder(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("~nobody-of-this-name/x", "home directory"),
        ("x" * 5000, "too long"),
        ("/dev/null/x", "Not a directory"),
    ],
)
def test_a_path_that_leads_nowhere(path: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        load_model(path, device="cpu")


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refused(tmp_path / "file")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json" in refused(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_unreadable_config(folder: Path) -> None:
    (folder / "config.json").chmod(0)
    assert "cannot read" in refused(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", '{"hidden_size": 3}', '{"model_type": 5}'])
def test_config_that_is_no_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in refused(folder)


def test_unknown_model_type(folder: Path) -> None:
    change_config(folder, model_type="nosuchmodel")
    assert "nosuchmodel" in refused(folder)


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": "wide"}, {"num_attention_heads": 0}, {"num_hidden_layers": -1}, {"vocab_size": None}],
)
def test_config_with_nonsense_in_it(folder: Path, changes: dict[str, Any]) -> None:
    change_config(folder, **changes)
    refused(folder)


def test_config_that_does_not_fit_the_weights(folder: Path) -> None:
    change_config(folder, intermediate_size=80)
    assert "other shapes than its config.json says" in refused(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": ...},
        {"num_hidden_layers": ...},
        {"num_hidden_layers": 10**9},
        {"num_key_value_heads": 10**9},
    ],
)
def test_sizes_missing_or_absurd_are_refused_before_anything_is_loaded(
    folder: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Path] = []
    monkeypatch.setattr(model, "_load_module", lambda folder, *how: loaded.append(folder))
    change_config(folder, **changes)
    assert next(iter(changes)) in refused(folder)
    assert not loaded


def test_weights_that_lack_a_layer(folder: Path) -> None:
    change_config(folder, num_hidden_layers=4)
    assert "lacks" in refused(folder)


def test_weights_cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "cannot load the model" in refused(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in refused(folder)


def test_encoder_decoder(tmp_path: Path) -> None:
    transformers.T5Config(d_model=16, num_layers=1).save_pretrained(tmp_path)
    assert "encoder-decoder" in refused(tmp_path)


def test_not_a_causal_language_model(tmp_path: Path) -> None:
    transformers.BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    assert "BertForMaskedLM, which is not a causal language model" in refused(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        lambda: transformers.MambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=64),
        lambda: transformers.Qwen3NextConfig(num_hidden_layers=4, hidden_size=32, vocab_size=64),
        lambda: transformers.FalconH1Config(num_hidden_layers=2, hidden_size=32, vocab_size=64),
        lambda: transformers.JambaConfig(num_hidden_layers=8, hidden_size=32, vocab_size=64),
    ],
)
def test_recurrent_state(tmp_path: Path, config: Callable[[], Any]) -> None:
    config().save_pretrained(tmp_path)
    assert "no recurrent or compressed state" in refused(tmp_path)


def test_unknown_dtype_and_device(folder: Path) -> None:
    assert "'int3' is unknown; accepted are auto, float32" in refused(folder, dtype="int3")
    assert "'abacus' is unknown" in refused(folder, device="abacus")
    assert "'meta' is not supported" in refused(folder, device="meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has one")
def test_cuda_where_there_is_none(folder: Path) -> None:
    assert "this host has 0 CUDA devices" in refused(folder, device="cuda")


def test_unknown_attention(folder: Path) -> None:
    assert "cannot load the model" in refused(folder, attention="telepathy")


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_context_ends_where_rotary_frequencies_would_depend_on_length(folder: Path, rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    change_config(folder, rope_parameters=rope)
    assert load_model(folder, device="cpu").context_tokens == 128


def test_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert "cannot load the tokenizer" in refused(folder)


def test_a_list_of_end_tokens(folder: Path) -> None:
    transformers.GenerationConfig(eos_token_id=[7, 9]).save_pretrained(folder)
    assert load_model(folder, device="cpu").eos_ids == {7, 9}
