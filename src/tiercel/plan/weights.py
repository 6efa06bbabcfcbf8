"""What a model's weights weigh: parameters counted from the configuration, and bytes by storage format.

The count covers decoder families whose layer plan is known (dense, gated, mixture of experts, MLA); for
others it is None and the caller asks for the number. Vision and audio towers are not counted. It never
opens a weight file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from tiercel.errors import ConfigError
from tiercel.geometry.fields import Fields
from tiercel.geometry.load import text_part
from tiercel.geometry.shapes import HIDDEN_NAMES, head_dim, kv_heads, max_tokens, num_layers, query_heads

_TWO_MATRIX = frozenset(
    """gpt2 gptj gpt_neox gpt_neo opt bloom falcon phi mpt starcoder2 gpt_bigcode nemotron codegen
    arcee""".split()
)
_GATED = frozenset(
    """llama qwen2 qwen3 mistral ministral ministral3 gemma gemma2 gemma3_text phi3 granite olmo olmo2 olmo3
    cohere cohere2 glm glm4 stablelm smollm3 seed_oss ernie4_5 internlm2 exaone4 helium qwen2_vl_text
    qwen2_5_vl_text qwen3_vl_text""".split()
)
_EXPERTS = frozenset(
    """mixtral qwen2_moe qwen3_moe qwen3_vl_moe_text deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm4_moe
    glm_moe_dsa gpt_oss minimax_m2 olmoe llama4_text""".split()
)
_LEARNED_POSITIONS = frozenset("gpt2 gpt_neo opt gpt_bigcode".split())
_TIED_BY_DEFAULT = frozenset(
    "gemma gemma2 gemma3_text gpt2 bloom falcon opt mpt gpt_bigcode cohere cohere2 starcoder2".split()
)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameter counts. `embedding` (input and output tables) is the part that quantisation leaves alone."""

    total: int
    embedding: int
    how: str


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One storage format of weights: `bits` per parameter, `group_bits` more per `group` parameters."""

    name: str
    bits: int
    group: int = 0
    group_bits: int = 0
    embedding_bits: int | None = None
    note: str = ""

    def bits_per_parameter(self) -> Fraction:
        """Bits of a quantised parameter, its share of scales and zero points included."""
        return self.bits + Fraction(self.group_bits, self.group or 1)

    def nbytes(self, parameters: Parameters) -> int:
        """Bytes of all weights in this format."""
        kept = parameters.embedding if self.embedding_bits is not None else 0
        packed = (parameters.total - kept) * self.bits_per_parameter()
        bits = packed + kept * (self.embedding_bits or 0)
        return -(-bits.numerator // (8 * bits.denominator))


_FORMATS = (
    WeightFormat("fp32", 32),
    WeightFormat("bf16", 16),
    WeightFormat("fp16", 16),
    WeightFormat("fp8", 8, 128 * 128, 32, 16, "4 B scale per 128×128 block, embeddings in 16 bits"),
    WeightFormat("int8", 8, 0, 0, 16, "embeddings in 16 bits"),
    WeightFormat("awq-int4", 4, 128, 16 + 4, 16, "per 128: 2 B scale, ½ B zero point; embeddings in 16 bits"),
    WeightFormat(
        "gptq-int4", 4, 128, 16 + 4, 16, "per 128: 2 B scale, ½ B zero point; embeddings in 16 bits"
    ),
    WeightFormat("nvfp4", 4, 16, 8, 16, "per 16: 1 B scale; embeddings in 16 bits"),
    WeightFormat("mxfp4", 4, 32, 8, 16, "per 32: 1 B scale; embeddings in 16 bits"),
)
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {fmt.name: fmt for fmt in _FORMATS}
_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "awq": "awq-int4", "gptq": "gptq-int4"}
_ALIASES |= {"int4": "awq-int4", "fp4": "nvfp4"}


def weight_format(name: str) -> WeightFormat:
    """The format called `name`. Raises ConfigError that lists them."""
    key = name.strip().lower()
    found = WEIGHT_FORMATS.get(_ALIASES.get(key, key))
    if found is None:
        raise ConfigError(f"--weights-dtype: {name!r}; accepted: {', '.join(WEIGHT_FORMATS)}")
    return found


def count_parameters(source: str, config: Mapping[str, object]) -> Parameters | None:
    """Parameters of the text model, or None for a family whose layer plan is not known here."""
    model_type, fields = text_part(source, config)
    if model_type not in _TWO_MATRIX | _GATED | _EXPERTS or fields.optional("vocab_size") is None:
        return None
    hidden = fields.count(*HIDDEN_NAMES)
    layers = num_layers(fields)
    table = fields.count("vocab_size") * hidden
    tied = fields.flag("tie_word_embeddings", default=model_type in _TIED_BY_DEFAULT)
    embedding = table * (1 if tied else 2)
    if model_type in _LEARNED_POSITIONS:
        embedding += (max_tokens(fields) or 0) * hidden
    attention = _attention(model_type, fields, hidden)
    feed_forward = [_feed_forward(model_type, fields, hidden, i) for i in range(layers)]
    if any(size is None for size in feed_forward):
        return None
    norms = (2 * layers + 1) * hidden
    total = embedding + layers * attention + sum(size or 0 for size in feed_forward) + norms
    part = "text part, " if fields.path else ""
    return Parameters(total, embedding, f"{part}counted from the configuration, biases left out")


def _attention(model_type: str, fields: Fields, hidden: int) -> int:
    heads = query_heads(fields)
    rank = fields.optional("kv_lora_rank")
    if rank is not None:
        nope, rope = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
        value = fields.count("v_head_dim")
        query = fields.optional("q_lora_rank")
        width = heads * (nope + rope)
        queries = hidden * width if query is None else query * (hidden + width)
        index = _indexer(fields, hidden, query)
        return (
            queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden + index
        )
    dim = head_dim(fields, heads)
    shared = 1 if _one_head(model_type, fields) else kv_heads(fields, heads)
    return hidden * dim * (heads + 2 * shared) + heads * dim * hidden


def _one_head(model_type: str, fields: Fields) -> bool:
    if model_type == "falcon" and fields.flag("new_decoder_architecture"):
        return False
    return model_type in ("falcon", "gpt_bigcode") and fields.flag("multi_query", default=True)


def _indexer(fields: Fields, hidden: int, query: int | None) -> int:
    heads, dim = fields.optional("index_n_heads"), fields.optional("index_head_dim")
    if heads is None or dim is None:
        return 0
    return (query or hidden) * heads * dim + hidden * dim + hidden * heads


def _feed_forward(model_type: str, fields: Fields, hidden: int, layer: int) -> int | None:
    inner = fields.optional("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim") or 4 * hidden
    if model_type in _TWO_MATRIX:
        return 2 * hidden * inner
    if model_type in _GATED:
        return 3 * hidden * inner
    experts = fields.optional("n_routed_experts", "num_experts", "num_local_experts")
    if experts is None:
        return 3 * hidden * inner
    if model_type == "llama4_text":
        return _llama4_layer(fields, hidden, inner, experts, layer)
    if layer < (fields.optional("first_k_dense_replace", least=0) or 0):
        return 3 * hidden * inner
    each = fields.optional("moe_intermediate_size") or inner
    shared = fields.optional("shared_expert_intermediate_size", least=0) or 0
    shared += each * (fields.optional("n_shared_experts", least=0) or 0)
    return hidden * experts + 3 * hidden * (experts * each + shared)


def _llama4_layer(fields: Fields, hidden: int, inner: int, experts: int, layer: int) -> int:
    step = fields.optional("interleave_moe_layer_step") or 1
    if (layer + 1) % step:
        return 3 * hidden * (fields.optional("intermediate_size_mlp") or inner)
    return hidden * experts + 3 * hidden * inner * (experts + 1)
