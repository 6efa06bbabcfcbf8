"""Stable digests: of a configuration's meaning, and of a geometry. Never Python's `hash`.

Two configurations that differ in a field which can change the cached numbers (rope theta and scaling,
norms, activations, weight quantisation ...) never share a digest. Fields that cannot (names, versions,
token ids, generation settings) are left out; an unknown field counts as one that can.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercel.geometry.model import KVGeometry

_FORMAT = "tiercel-geometry-1"

# Naming, bookkeeping, training and sampling: none of them reaches a key or a value.
_WITHOUT_EFFECT = frozenset(
    """_name_or_path architectures attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward classifier_dropout cls_token_id decoder_start_token_id diversity_penalty do_sample
    dropout dtype early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id hidden_dropout id2label initializer_range
    is_encoder_decoder label2id length_penalty max_length max_position_embeddings min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id pretraining_tp problem_type
    remove_invalid_values repetition_penalty resid_pdrop embd_pdrop attn_pdrop return_dict
    return_dict_in_generate router_aux_loss_coef sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p use_bfloat16 use_cache prefix pruned_heads
    unk_token_id""".split()
)


def _plain(value: object) -> object:
    """`value` with nulls dropped, mapping keys sorted and 1.0 written as 1."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str) if value[key] is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _with_rope_in_one_form(config: Mapping[str, Any]) -> dict[str, Any]:
    """Move `rope_theta` and `rope_scaling` into `rope_parameters`: two spellings of one setting."""
    fields = {key: config[key] for key in config if key not in _WITHOUT_EFFECT}
    parameters = fields.get("rope_parameters")
    scaling = fields.get("rope_scaling")
    nested = isinstance(parameters, Mapping) and any(isinstance(v, Mapping) for v in parameters.values())
    if nested or not isinstance(parameters, Mapping | None) or not isinstance(scaling, Mapping | None):
        return fields
    rope = {**(scaling or {}), **(parameters or {})}
    theta = fields.pop("rope_theta", None)
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if theta is not None:
        rope.setdefault("rope_theta", theta)
    if rope.get("rope_type") == "default":
        del rope["rope_type"]
    fields.pop("rope_scaling", None)
    fields["rope_parameters"] = rope or None
    return fields


def config_fingerprint(config: Mapping[str, Any]) -> bytes:
    """32 bytes over every field of a text configuration that may change what is cached."""
    text = json.dumps(_plain(_with_rope_in_one_form(config)), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def geometry_digest(geometry: KVGeometry) -> bytes:
    """32 bytes over the layout of the cache and the fingerprint of the configuration behind it."""
    groups = [
        [
            group.kind.value,
            list(group.layers),
            [group.kv_heads, group.key_dim, group.value_dim],
            [group.window_tokens, group.entry_bytes, group.tokens_per_entry, group.source_tokens],
            [[part.name, part.units, part.unit_elements, part.element_bytes] for part in group.state],
        ]
        for group in geometry.groups
    ]
    whole = [_FORMAT, geometry.model_type, geometry.num_layers, groups, geometry.fingerprint.hex()]
    text = json.dumps(whole, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()
