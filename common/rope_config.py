"""A model's config, of any age, read into the arguments of ``get_rope``. No library of models is imported.

What a config says is used; what it leaves to its model's code (the pairing of a head's elements, a base that the code
has as a default) is known here by ``model_type``; what is neither is an error, not a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# Where a multimodal config keeps its language model's.
_TEXT_CONFIGS = tuple("text_config language_config llm_config thinker_config vlm_config decoder decoder_config".split())
_THETAS = ("rope_theta", "rotary_emb_base", "rotary_embedding_base", "rope_base", "theta", "rotary_base")
_PARTIALS = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_percent", "rotary_emb_fraction")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "model_max_length")

# --- what models' code has that their configs do not say -------------------------------------------------------------

# Pairs (2i, 2i+1), by model_type; configs with `rope_interleave` say it themselves.
_GPTJ_STYLE = frozenset(
    """axk1 axk2 bailing_hybrid blt chatglm codegen cohere cohere2 cohere2_moe deepseek_v2 deepseek_v3
    deepseek_v32 deepseek_v4 dots3_note efficientloftr ernie4_5 ernie4_5_moe ernie4_5_vl ernie4_5_vl_moe glm glm4
    glm4_moe_lite glm4v glm_moe_dsa glm_ocr gptj helium hy_v4_vl inkling2_vision kimi_k2 llama4 llama4_vision_model
    longcat_flash mistral4 mistral_large4 moonshine moonshine_streaming musicflamingo openai_privacy_filter
    pe_audio_encoder pe_audio_video_encoder pe_video_encoder roformer sam3_vit_model youtu""".split()
)
# Pairs (i, i + rotary_dim/2).
_NEOX_STYLE = frozenset(
    """afmoe apertus apertus1p5 aquila arcee aria baichuan bamba beam bitnet chameleon cohere_compass
    cohere_compass_vision cosmos3_edge csm cwm dbrx deepseek deepseek_ocr2 deepseek_ocr2_encoder
    deepseek_ocr2_vision dia dia_decoder dia_encoder diffllama diffusion_gemma doge dory dots1 dots3_note_audio_encoder
    dots3_note_vision_encoder embedding_gemma2 emu3 emu3_text_model ernie4_5_vl_moe_vision esm esmc eurobert evolla
    exaone exaone4 exaone4_5_vision exaone_moe falcon falcon_h1 flex_olmo flint gemma gemma2 gemma3 gemma3n gemma4
    gemma4_unified gemma4_vision glm4_moe glm4v_moe glm4v_moe_vision glm4v_vision glm5_next_vision glm_image
    glm_ocr_vision glmasr glmasr_encoder gpt_neox gpt_neox_japanese gpt_oss gradium_phonon_tts granite granite4_vision
    granite_docling granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared gte higgs_audio_v2 hrm_text
    hunyuan hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hy_v3 hy_v4 hyperclovax idefics internlm internlm2 internlm3
    jais2 jetmoe jina_embeddings_v3 kimi_k25_vision kolibri1 kyutai_speech_to_text laguna lara_mini lasr_encoder lfm2
    lfm2_moe lfm3 lfm3_vl_vision llama mellum mimi mimo mimo_v2_flash minicpm minicpm3 minimax minimax_m2 minimax_m3_vl
    minimax_m3_vl_vision ministral ministral3 mistral mixtral mlcd_vision_model mllama mllama_text_model modernbert
    modernbert-decoder molmo2 moshi muse_glimmer muse_glimmer_assistant muse_glimmer_vision muse_spark
    muse_spark_vision nemotron nemotron3_5_transcribe_asr_audio nemotron3_diarization neomme neucodec nomic_bert olmo
    olmo2 olmo3 olmo_hybrid olmoe openpangu_vl orion paddleocr_vl paddleocr_vl_vision persimmon phi phi3
    phi4_multimodal phimoe pixtral pocket_tts pocket_tts_audio_tokenizer qwen qwen2 qwen2_5_omni qwen2_5_omni_dit
    qwen2_5_omni_vision_encoder qwen2_5_vl qwen2_5_vl_vision qwen2_moe qwen2_vl qwen2_vl_vision qwen3 qwen3_5
    qwen3_5_moe qwen3_5_moe_vision qwen3_5_vision qwen3_moe qwen3_next qwen3_omni_moe
    qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_vision_encoder qwen3_vl qwen3_vl_moe qwen3_vl_moe_vision
    qwen3_vl_vision qwen4_exp qwen4_exp_vision recurrent_gemma seed_oss smollm3 solar_open stablelm starcoder2 step3p5
    step3p5_vision step3p7 t5_gemma_module t5gemma t5gemma2 telechat telechat3 timesfm2_5 ultrabert unlimited_ocr
    vaultgemma video_llama_3_vision voxtral_realtime wav2vec2-bert wav2vec2-conformer xcodec2 xverse zamba2
    zaya""".split()
)
_BACKWARDS = frozenset({"nanochat"})  # turns its pairs by the negative angle

# The bases of models whose configs may leave theirs out, where it is not RoFormer's 10000; for a rope of each layer
# type, by type.
_DEFAULT_THETAS: dict[str, float | dict[str, float]] = {
    **dict.fromkeys(
        """bitnet blt cohere csm ernie4_5 ernie4_5_moe ernie4_5_vl_moe evolla flex_olmo higgs_audio_v2 llama4
        mllama_text_model muse_glimmer_assistant muse_spark olmo3 paddleocr_vl qwen3_vl qwen3_vl_moe""".split(),
        500_000.0,
    ),
    **dict.fromkeys(
        """cwm emu3_text_model lfm2 lfm2_moe lfm3_vl_vision minimax ministral3 mixtral phimoe qwen2_5_omni qwen2_5_vl
        qwen2_vl qwen3_omni_moe solar_open""".split(),
        1_000_000.0,
    ),
    **{name: {"full_attention": 1e6} for name in ("gemma3", "gemma3n", "t5gemma2")},
    **{name: {"full_attention": 160_000.0} for name in ("modernbert", "modernbert-decoder")},
    **dict.fromkeys(("gpt_oss", "openai_privacy_filter"), 150_000.0),
    **dict.fromkeys(("pe_audio_encoder", "pe_audio_video_encoder", "pe_video_encoder"), 20_000.0),
    **dict.fromkeys(("apertus", "apertus1p5"), 12_000_000.0),
    **dict.fromkeys(("minimax_m2", "minimax_m3_vl"), 5_000_000.0),
    **dict.fromkeys(("gemma4_vision", "eomt_dinov3"), 100.0),
    "bailing_hybrid": 6_000_000.0,
    "cosmos3_edge": 100_000_000.0,
    "gte": 160_000.0,
    "helium": 100_000.0,
    "hy_v3": 11_158_840.0,
    "jina_embeddings_v3": 20_000.0,
    "longcat_flash": 10_000_000.0,
    "musicflamingo": 1200.0,
    "nomic_bert": 1000.0,
    "openpangu_vl": 64_000_000.0,
    "smollm3": 2_000_000.0,
}
# Models whose code has more than a base if their configs say nothing of the rope: a scaling, one for each layer type,
# two axes.
_NEED_PARAMETERS = frozenset(
    """apertus apertus1p5 beam cwm deepseek_v4 diffusion_gemma dory dots3_note embedding_gemma2 gemma4 gemma4_unified
    gpt_oss higgs_audio_v2 laguna lfm3 mellum mimo_v2_flash ministral3 mistral4 mistral_large4 neomme
    openai_privacy_filter openpangu_vl pixtral sam3_vit_model ultrabert zaya""".split()
)
_DEFAULT_PARTIALS = {
    "chatglm": 0.5,
    "gpt_neox": 0.25,
    "qwen3_next": 0.25,
    "qwen3_5": 0.25,
    "qwen3_5_moe": 0.25,
    "stablelm": 0.25,
    "moonshine": 0.9,
    "moonshine_streaming": 0.8,
    **dict.fromkeys(
        """bamba dots3_note_audio_encoder glm glm4 glm4_moe glm4v_moe nemotron nemotron3_5_transcribe_asr_audio persimmon
        phi recurrent_gemma""".split(),
        0.5,
    ),
}
# Positions of several axes: the pairs of each axis, where a config may leave them out, and how axes take turns.
_MROPE: dict[str, tuple[tuple[int, ...] | None, str]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "paddleocr_vl"), ((16, 24, 24), "chunked")),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"), ((24, 20, 20), "interleaved")),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen4_exp"), ((11, 11, 10), "interleaved")),
    **dict.fromkeys(("cohere_compass", "cosmos3_edge"), ((24, 20, 20), "interleaved")),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm_image", "glm_ocr"), ((8, 12, 12), "chunked")),
    **dict.fromkeys(("ernie4_5_vl", "ernie4_5_vl_moe"), ((22, 22, 20), "ernie")),
    "hy_v4_vl": ((12, 10, 10), "interleaved"),
    "hunyuan_vl": (None, "chunked"),
    "neomme": (None, "in turn"),
    **dict.fromkeys(("openpangu_vl", "openpangu_omni", "openpangu_v2_omni"), (None, "pangu")),  # if mrope_interleaved
}
# Ropes of an image's rows and columns, where they are not Qwen2-VL's: see rope_frequencies.axial.
_AXIAL_LAYOUTS = {
    "pixtral": "alternate",
    "step3p5_vision": "columns first",
    "inkling2_vision": "columns first",
    "kimi_k25_vision": "columns in turn",
}


class _Local(NamedTuple):
    """How an older config means its fields where a model's local layers (``sliding_attention``) have their own rope."""

    scaled: bool  # rope_scaling is theirs too
    own_base: bool  # their base is 10000 where the config does not give it, else that of all layers


_LOCAL_LAYERS = {
    **dict.fromkeys(("gemma3", "gemma3n", "t5gemma2"), _Local(False, True)),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), _Local(True, True)),
    "olmo3": _Local(False, False),
}
_LOCAL_THETAS = ("rope_local_base_freq", "local_rope_theta", "rope_local_theta")

_SYNONYMS = {"mrope": "default", "su": "longrope"}
# Keys beside a rope's parameters that speak of something else: Mistral's factor on queries, applied in the attention.
_NOT_OF_THE_ROPE = ("rope_theta", "llama_4_scaling_beta", "max_position_embeddings", *_PARTIALS)
# Fields of a config that name a rope and are read here, or do not change its values (which layers have one, say).
_READ_OR_HARMLESS = frozenset(
    """rope_parameters rope_scaling rope_interleave rope_type rotary rotary_emb_interleaved rotary_dim rotary_ndims
    rope_ratio qk_rope_head_dim qk_nope_head_dim global_rope_theta compress_rope_theta rope_scaling_layers
    no_rope_layers no_rope_layer_interval nope_layer_interval use_rope use_rotary_embedding layer_rope_theta
    rotary_value rope_enabled use_mem_rope ignore_keys_at_rope_validation""".split()
) | {*_THETAS, *_PARTIALS, *_LOCAL_THETAS}


@dataclass(frozen=True)
class RopeArguments:
    """Arguments of ``get_rope``, as a config gives them; ``head_size`` is that of the rotated part's head."""

    head_size: int
    rotary_dim: int
    max_position: int
    base: float
    is_neox_style: bool
    rope_scaling: dict[str, Any] | None


def read_rope_config(
    config: Any, *, layer_type: str | None = None, max_position: int | None = None, is_neox_style: bool | None = None
) -> RopeArguments:
    """Read the rope of a model.

    Args:
        config: a transformers config object, or the dict of a ``config.json``, of any age: ``rope_theta`` with
            ``rope_scaling`` (``type`` or ``rope_type``); ``rope_parameters``, flat or one per layer type; the text
            config of a multimodal model; ``partial_rotary_factor``, ``rotary_pct``, ``rotary_dim``; ``head_dim``,
            hidden size over heads, or ``qk_rope_head_dim``; ``rope_local_base_freq`` of local layers.
        layer_type: which layers, where a config has a rope for each type (``full_attention``, ``sliding_attention``).
        max_position: the longest sequence to serve, instead of the config's ``max_position_embeddings``. Values depend
            on it where the rope type follows the sequence's length (dynamic NTK, longrope), as Hugging Face's do.
        is_neox_style: instead of the style known for the config's ``model_type``.

    Raises:
        ValueError: a field is missing, contradicts another, or would have to be ignored; the message names it.
    """
    fields = _Fields(_layer_part(_language_part(config), layer_type))
    _refuse_unknown(fields)
    scaling = _parameters(fields, layer_type)
    base = _base(fields, scaling, layer_type)
    head_size, rotary_dim = _sizes(fields, scaling)
    partial = next((scaling[name] for name in _PARTIALS if scaling.get(name) is not None), None)
    scaling = {k: v for k, v in scaling.items() if k not in _NOT_OF_THE_ROPE and v is not None}
    older = scaling.pop("type", None)
    kind = scaling.setdefault("rope_type", "default" if older is None else older)
    if older is not None and _SYNONYMS.get(older, older) != _SYNONYMS.get(kind, kind):
        raise ValueError(f"type={older!r} of the config's rope_parameters contradicts its rope_type {kind!r}")
    limit = fields.first(*_LENGTHS)
    if limit is None and kind == "axial":
        limit = 1024  # rows and columns of patches: a table's first size, it grows
    if max_position is None and limit is None:
        raise ValueError("the config has no max_position_embeddings; give max_position")
    if kind in ("yarn", "su") and "short_factor" in scaling:
        kind = scaling["rope_type"] = "longrope"  # as Phi-3's first configs call it
    length = _length(fields, kind, scaling, limit, max_position)
    if kind == "proportional":
        scaling.setdefault("rope_proportion", 1.0 if partial is None else partial)
    if kind == "axial":
        layout = _known(_AXIAL_LAYOUTS, fields)
        if layout is not None:
            scaling["layout"] = layout
    _complete_axes(fields, scaling, kind, rotary_dim)
    if scaling == {"rope_type": "default"}:
        scaling = None
    style = _style(fields) if is_neox_style is None else is_neox_style
    return RopeArguments(head_size, rotary_dim, length, base, style, scaling)


def layer_types(config: Any) -> tuple[str, ...]:
    """The layer types that a config has a rope of its own for; empty where all layers share one."""
    fields = _Fields(_language_part(config))
    parameters = fields.first("rope_parameters", "rope_scaling") or {}
    nested = tuple(k for k, v in parameters.items() if isinstance(v, Mapping))
    if not nested and (fields.first(*_LOCAL_THETAS) is not None or _known(_LOCAL_LAYERS, fields) is not None):
        return ("full_attention", "sliding_attention")
    return nested


# --- reading ---------------------------------------------------------------------------------------------------------


class _Fields:
    """A config object or dict, read alike."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def get(self, name: str, default: Any = None) -> Any:
        if isinstance(self.config, Mapping):
            return self.config.get(name, default)
        try:
            return getattr(self.config, name, default)
        except RuntimeError as error:  # transformers, of a field that differs between layers
            raise ValueError(f"{name} of the config differs between its layers; give one layer's config") from error

    def first(self, *names: str) -> Any:
        return next((v for v in map(self.get, names) if v is not None), None)

    def names(self) -> list[str]:
        fields = self.config if isinstance(self.config, Mapping) else vars(self.config)
        return [name for name in fields if isinstance(name, str) and not name.startswith("_")]

    @property
    def model_type(self) -> str:
        return self.get("model_type") or ""


def _known(table: Mapping[str, Any], fields: _Fields) -> Any:
    """The entry of the config's model type; a text config may be called after its model."""
    name = fields.model_type
    return table.get(name, table.get(name.removesuffix("_text")))


def _language_part(config: Any) -> Any:
    """The config that holds the heads: the config itself, or the language model's within it."""
    fields = _Fields(config)
    names = fields.names()
    whole = any(fields.get(n) is not None for n in ("rope_parameters", "rope_scaling", "rope_theta") if n in names)
    whole = whole and {"num_attention_heads", "n_head", "n_heads", "num_heads", "head_dim"} & set(names)
    inner = fields.first(*_TEXT_CONFIGS[: 1 if whole else None])  # a text config beside copies of its fields rules
    if inner is None or isinstance(inner, (str, int)):
        return config
    return _language_part(inner)


def _layer_part(config: Any, layer_type: str | None) -> Any:
    """The config of one layer type, where head sizes differ between them (Gemma 4)."""
    fields = _Fields(config)
    if layer_type is None:
        return config
    if isinstance(config, Mapping):
        own = _layer_fields(config, layer_type)
        if layer_type == "full_attention" and config.get("global_head_dim") is not None:
            own["head_dim"] = config["global_head_dim"]
        return {**config, **own}
    per_layer = fields.get("per_layer_config")
    try:
        return config if per_layer is None else per_layer[layer_type]
    except (KeyError, ValueError, TypeError):  # its layers differ in something else
        return config


def _layer_fields(config: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """What ``per_layer_config`` of a ``config.json`` says of the head sizes of all layers of a type."""
    per_layer, kinds = config.get("per_layer_config") or {}, config.get("layer_types") or []
    layers = [per_layer.get(key, {}) for i, kind in enumerate(kinds) if kind == layer_type for key in (f"{i:02}",)]
    own = {}
    for name in ("head_dim", "hidden_size", "num_attention_heads", "qk_rope_head_dim"):
        values = {layer[name] for layer in layers if name in layer}
        if len(values) == 1 and all(name in layer for layer in layers):
            own[name] = values.pop()
    return own


def _refuse_unknown(fields: _Fields) -> None:
    """Fields that speak of the rope and that nobody here reads."""
    for name in fields.names():
        words = set(name.split("_"))
        if name in _READ_OR_HARMLESS or not {"rope", "rotary", "xpos", "ntk"} & words or "dropout" in words:
            continue
        value = fields.get(name)
        if value is None or value is False:
            continue
        raise ValueError(f"{name}={value!r} of the config may change its rope in a way that is not supported")
    if fields.get("alibi"):
        raise ValueError(f"alibi={fields.get('alibi')!r} of the config: its model has no rope")
    bases = fields.get("layer_rope_theta")
    if bases is not None and len({base for base in bases if base}) > 1:
        raise ValueError(
            f"layer_rope_theta of the config has the bases {sorted({b for b in bases if b})}; expected one"
        )


def _parameters(fields: _Fields, layer_type: str | None) -> dict[str, Any]:
    """``rope_parameters`` (or the older ``rope_scaling``) of the layer type, flat."""
    parameters, older = fields.get("rope_parameters"), fields.get("rope_scaling")
    if not parameters:
        parameters, older = older, None
    if older and older != parameters and not _agree(parameters, older):
        raise ValueError(f"rope_scaling={older!r} of the config contradicts its rope_parameters {parameters!r}")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters of the config is {parameters!r}; expected a dict")
    names = {fields.model_type, fields.model_type.removesuffix("_text")}
    if not parameters and (names & _NEED_PARAMETERS or _is_vision(fields)):
        raise ValueError(f"the config has no rope_parameters, which model_type {fields.model_type!r} needs; add them")
    parameters = dict(parameters or {})
    nested = {k: v for k, v in parameters.items() if isinstance(v, Mapping)}
    if not nested:
        return _older_parameters(fields, parameters, layer_type)
    if layer_type is None:
        distinct = {repr(sorted(v.items(), key=str)) for v in nested.values()}
        if len(distinct) > 1:
            raise ValueError(f"the config has a rope for each layer type; give layer_type, one of {', '.join(nested)}")
        layer_type = next(iter(nested))
    if layer_type not in nested:
        raise ValueError(f"layer_type is {layer_type!r}; the config has {', '.join(nested)}")
    return dict(nested[layer_type])


def _agree(parameters: Any, older: Any) -> bool:
    """Whether nothing in the older field is missing from the newer, or other."""
    if not (isinstance(parameters, Mapping) and isinstance(older, Mapping)):
        return False
    names = {name: "rope_type" if name == "type" else name for name in older}
    return all(parameters.get(names[name]) == value for name, value in older.items() if value is not None)


def _older_parameters(fields: _Fields, parameters: dict[str, Any], layer_type: str | None) -> dict[str, Any]:
    """One dict for all layers, which a model with local layers may mean for its other layers only."""
    local = _known(_LOCAL_LAYERS, fields)
    if local is None and fields.first(*_LOCAL_THETAS) is None:
        return parameters
    if layer_type not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"layer_type is {layer_type!r}, but the config has a rope for each layer type; "
            "expected full_attention or sliding_attention"
        )
    scaled = local is not None and local.scaled
    return {} if layer_type == "sliding_attention" and not scaled else parameters


def _base(fields: _Fields, parameters: dict[str, Any], layer_type: str | None) -> float:
    default = _known(_DEFAULT_THETAS, fields)
    if isinstance(default, dict):
        default = default.get(layer_type, 10_000.0)
    said, beside = parameters.get("rope_theta"), fields.first(*_THETAS)
    if beside is None:
        beside = _Fields(fields.get("attn_config") or {}).get("rope_theta")  # DBRX
    local = _known(_LOCAL_LAYERS, fields)
    local_theta = fields.first(*_LOCAL_THETAS)
    if layer_type == "sliding_attention" and (local is not None or local_theta is not None):
        own_base = local is None or local.own_base
        found = (said, local_theta, 10_000.0 if own_base else beside, default)
    else:
        own = fields.get(f"{'global' if layer_type == 'full_attention' else layer_type}_rope_theta")
        found = (said, own, beside, default)
        if None not in (said, beside) and said != beside and "rope_parameters" not in _nested(fields):
            raise ValueError(f"rope_theta={beside!r} of the config contradicts {said!r} of its rope_parameters")
    base = next((theta for theta in found if theta is not None), None)
    if base is None and (_is_known(fields) or parameters.get("rope_type") == "axial"):
        base = 10_000.0  # RoFormer's, which these models' configs may leave out
    if base is None:
        raise ValueError(
            f"the config has no rope_theta, and the base of model_type {fields.model_type!r} is not known; add it"
        )
    if isinstance(base, bool) or not isinstance(base, (int, float)):
        raise ValueError(f"rope_theta of the config is {base!r}; expected a number")
    return float(base) * float(fields.get("rope_ratio") or 1.0)  # ChatGLM's factor on the base


def _nested(fields: _Fields) -> tuple[str, ...]:
    """The fields that hold a rope for each layer type."""
    dicts = {name: fields.get(name) for name in ("rope_parameters", "rope_scaling")}
    return tuple(n for n, d in dicts.items() if d and any(isinstance(v, Mapping) for v in d.values()))


def _sizes(fields: _Fields, parameters: dict[str, Any]) -> tuple[int, int]:
    """Elements of the head that the rope sees, and how many of them it rotates."""
    latent = fields.get("qk_rope_head_dim")
    if latent:  # multi-head latent attention rotates a part of its own
        return int(latent), int(latent)
    head_size = fields.first("head_dim", "attention_head_dim", "kv_channels")
    if head_size is None:
        width = fields.first("embed_dim", "hidden_size", "n_embd", "d_model")
        heads = fields.first("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_num_attention_heads")
        if width is None or heads is None:
            raise ValueError("the config has neither head_dim nor hidden_size and num_attention_heads")
        head_size = width // heads
    head_size = int(head_size)
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind == "proportional":  # its factor leaves pairs still instead of leaving them out
        return head_size, head_size
    partial = next((v for v in map(parameters.get, _PARTIALS) if v is not None), None)
    beside = fields.first(*_PARTIALS)
    if partial is None:
        partial = beside
    elif beside is not None and beside != partial:
        raise ValueError(f"partial_rotary_factor={beside} of the config contradicts {partial} of its rope_parameters")
    explicit = fields.first("rotary_dim", "rotary_ndims")
    if explicit is not None:
        if partial is not None and int(head_size * partial) != explicit:
            raise ValueError(
                f"rotary_dim={explicit} of the config contradicts partial_rotary_factor={partial} of {head_size}"
            )
        return head_size, int(explicit)
    if partial is None:
        partial = _known(_DEFAULT_PARTIALS, fields)
    return head_size, int(head_size * (1.0 if partial is None else partial))


def _length(fields: _Fields, kind: str, scaling: dict[str, Any], limit: int | None, max_position: int | None) -> int:
    """The ``max_position`` of ``get_rope``; whatever of ``scaling`` follows from the config's own length is filled in,
    so that another ``max_position`` than the config's does not change it."""
    original = scaling.get("original_max_position_embeddings")
    beside = fields.get("original_max_position_embeddings")
    if beside is not None and kind in ("longrope", "su", "yarn", "llama3"):
        if original is not None and original != beside:
            raise ValueError(
                f"original_max_position_embeddings={beside} of the config contradicts {original} of its rope_scaling"
            )
        scaling["original_max_position_embeddings"] = original = beside
    if kind in ("yarn", "llama3", "longrope", "su", "deepseek_yarn") and original is None and limit is not None:
        scaling["original_max_position_embeddings"] = original = limit
    if kind in ("yarn", "longrope", "su") and scaling.get("factor") is None and limit is not None and original:
        scaling["factor"] = limit / original
    if kind == "dynamic" and scaling.get("alpha") is None:
        if limit is None:
            raise ValueError("the config has no max_position_embeddings, by which its dynamic rope is defined")
        scaling["seq_len"] = limit if max_position is None else max_position
        return int(limit)
    return int(limit if max_position is None else max_position)


def _complete_axes(fields: _Fields, scaling: dict[str, Any], kind: str, rotary_dim: int) -> None:
    """The sections of a rope whose positions have several axes, where the model's code has them."""
    known = _known(_MROPE, fields)
    if "xdrope_section" in scaling and kind != "xdrope":
        scaling["mrope_section"] = scaling.pop("xdrope_section")
    if known is None or kind == "axial":
        return
    section, layout = known
    if layout == "in turn":
        section, layout = (rotary_dim // 2 - rotary_dim // 4, rotary_dim // 4), "glm"
    if layout == "pangu" and not scaling.pop("mrope_interleaved", False):  # its code follows the flag
        layout = "chunked"
    if section is not None and "mrope_section" not in scaling:
        if 2 * sum(section) != rotary_dim:
            raise ValueError(
                f"the config has no mrope_section, and its model's {list(section)} does not fit {rotary_dim // 2} pairs"
            )
        scaling["mrope_section"] = list(section)
    if "mrope_section" in scaling:
        if scaling.pop("mrope_interleaved", layout == "interleaved") != (layout == "interleaved"):
            raise ValueError(f"mrope_interleaved of the config contradicts its model_type {fields.model_type!r}")
        scaling["mrope_layout"] = layout


def _is_known(fields: _Fields) -> bool:
    name = fields.model_type
    names = {name, name.removesuffix("_text")}
    return bool(names & _GPTJ_STYLE or names & _NEOX_STYLE or names & _BACKWARDS)


def _is_vision(fields: _Fields) -> bool:
    return fields.model_type.endswith(("_vision", "_vision_encoder", "_vision_model"))


def _style(fields: _Fields) -> bool:
    interleave = fields.first("rope_interleave", "rotary_emb_interleaved")
    if interleave is not None:
        return not interleave
    name = fields.model_type
    for known in (name, name.removesuffix("_text")):
        if known in _GPTJ_STYLE:
            return False
        if known in _NEOX_STYLE:
            return True
    if name in _BACKWARDS:
        raise ValueError(f"model_type {name!r} turns its pairs backwards; give is_neox_style, and rotate inversely")
    raise ValueError(f"the pairing style of model_type {name!r} is not known; give is_neox_style")
