"""A model's config, of any age, read into the arguments of ``get_rope``. No library of models is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Where a multimodal config keeps its language model's.
_TEXT_CONFIGS = ("text_config", "language_config", "llm_config", "thinker_config", "decoder")
_THETAS = ("rope_theta", "rotary_emb_base", "rope_base", "theta", "rotary_base")
_PARTIALS = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_ratio_dim")

# Pairs (2i, 2i+1) instead of halves, by model_type; configs with `rope_interleave` say it themselves.
_GPTJ_STYLE = frozenset(
    """axk2 bailing_hybrid chatglm codegen cohere cohere2 cohere2_moe cohere_compass_text deepseek_v2 deepseek_v32
    deepseek_v4 ernie4_5 ernie4_5_moe ernie4_5_vl_moe ernie4_5_vl_moe_text glm glm4 glm4v_text glm_moe_dsa glm_ocr_text
    gptj helium llama4 llama4_text longcat_flash moonshine moonshine_streaming roformer""".split()
)

_ERNIE = ("ernie4_5_vl", "ernie4_5_vl_moe", "ernie4_5_vl_moe_text")  # height and width in turn, time last

# Keys beside a rope's parameters that speak of something else: Mistral's factor on queries, applied in the attention.
_NOT_OF_THE_ROPE = ("rope_theta", "llama_4_scaling_beta", "max_position_embeddings", *_PARTIALS)

# Config fields that change a rope's values and that this reader does not know how to honour: better refused.
_REFUSED = ("rope_scale_base", "xpos_rel_pos", "use_xpos", "rope_local_scaling")


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
        max_position: instead of the config's ``max_position_embeddings``.
        is_neox_style: instead of the style known for the config's ``model_type``.

    Raises:
        ValueError: a field is missing, contradicts another, or would have to be ignored; the message names it.
    """
    fields = _Fields(_layer_part(_language_part(config), layer_type))
    for name in _REFUSED:
        if fields.get(name):
            raise ValueError(
                f"{name}={fields.get(name)!r} of the config changes its rope in a way that is not supported"
            )
    parameters = _parameters(fields, layer_type)
    base = _base(fields, parameters, layer_type)
    head_size, rotary_dim = _sizes(fields, parameters)
    limit = fields.first("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
    scaling = {k: v for k, v in parameters.items() if k not in _NOT_OF_THE_ROPE and v is not None}
    if "type" in scaling and "rope_type" in scaling:
        del scaling["type"]
    if max_position is None:
        max_position = limit
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if max_position is None and kind == "axial":
        max_position = 1024  # rows and columns of patches: a table's first size, it grows
    if max_position is None:
        raise ValueError("the config has no max_position_embeddings; give max_position")
    if (
        kind == "yarn"
        and "factor" not in scaling
        and limit is not None
        and "original_max_position_embeddings" in scaling
    ):
        scaling["factor"] = limit / scaling["original_max_position_embeddings"]
    if kind == "longrope":
        _complete_longrope(scaling, fields, limit)
    if kind == "proportional" and "rope_proportion" not in scaling:
        scaling["rope_proportion"] = parameters.get("partial_rotary_factor", 1.0)
    if kind == "axial" and fields.get("model_type") == "pixtral":
        scaling["alternate"] = True
    if fields.get("model_type") in _ERNIE:
        scaling.setdefault("mrope_section", [22, 22, 20])
        scaling["mrope_layout"] = "ernie"
    if kind == "default" and scaling.get("factor") == 1:
        del scaling["factor"]
    return RopeArguments(
        head_size,
        rotary_dim,
        int(max_position),
        base,
        _style(fields) if is_neox_style is None else is_neox_style,
        scaling or None,
    )


def layer_types(config: Any) -> tuple[str, ...]:
    """The layer types that a config has a rope of its own for; empty where all layers share one."""
    fields = _Fields(_language_part(config))
    parameters = fields.first("rope_parameters", "rope_scaling") or {}
    nested = tuple(k for k, v in parameters.items() if isinstance(v, Mapping))
    if not nested and fields.get("rope_local_base_freq") is not None:
        return ("full_attention", "sliding_attention")
    return nested


class _Fields:
    """A config object or dict, read alike."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def get(self, name: str, default: Any = None) -> Any:
        if isinstance(self.config, Mapping):
            return self.config.get(name, default)
        return getattr(self.config, name, default)

    def first(self, *names: str) -> Any:
        return next((v for v in map(self.get, names) if v is not None), None)


def _language_part(config: Any) -> Any:
    """The config that holds the heads: the config itself, or the language model's within it."""
    fields = _Fields(config)
    if (
        fields.first("rope_parameters", "rope_theta", "rope_scaling") is None
        or fields.first("num_attention_heads", "n_head", "head_dim") is None
    ):
        inner = fields.first(*_TEXT_CONFIGS)
        if inner is not None and not isinstance(inner, (str, int)):
            return _language_part(inner)
    return config


def _layer_part(config: Any, layer_type: str | None) -> Any:
    """The config of one layer type, where head sizes differ between them (Gemma 4)."""
    per_layer = _Fields(config).get("per_layer_config")
    if layer_type is None or per_layer is None:
        return config
    try:
        return per_layer[layer_type]
    except (KeyError, ValueError, TypeError):  # its layers differ in something else
        return config


def _parameters(fields: _Fields, layer_type: str | None) -> dict[str, Any]:
    """``rope_parameters`` (or the older ``rope_scaling``) of the layer type, flat."""
    parameters = fields.get("rope_parameters")
    if parameters is None:
        parameters = fields.get("rope_scaling")
    parameters = dict(parameters or {})
    nested = {k: v for k, v in parameters.items() if isinstance(v, Mapping)}
    if not nested:
        return parameters
    if layer_type is None:
        distinct = {repr(sorted(v.items(), key=str)) for v in nested.values()}
        if len(distinct) > 1:
            raise ValueError(f"the config has a rope for each layer type; give layer_type, one of {', '.join(nested)}")
        layer_type = next(iter(nested))
    if layer_type not in nested:
        raise ValueError(f"layer_type is {layer_type!r}; the config has {', '.join(nested)}")
    return dict(nested[layer_type])


def _base(fields: _Fields, parameters: dict[str, Any], layer_type: str | None) -> float:
    local = fields.get("rope_local_base_freq")
    if layer_type == "sliding_attention" and local is not None and parameters.get("rope_theta") is None:
        return float(local)
    found = parameters.get("rope_theta")
    if found is None:
        found = fields.first(*_THETAS)
    return 10000.0 if found is None else float(found)  # RoFormer's, which configs before rope_theta leave out


def _sizes(fields: _Fields, parameters: dict[str, Any]) -> tuple[int, int]:
    """Elements of the head that the rope sees, and how many of them it rotates."""
    latent = fields.get("qk_rope_head_dim")
    if latent:  # multi-head latent attention rotates a part of its own
        return int(latent), int(latent)
    head_size = fields.first("head_dim", "kv_channels", "attention_head_dim")
    if head_size is None:
        width, heads = (
            fields.first("embed_dim", "hidden_size", "n_embd", "d_model"),
            fields.first("num_attention_heads", "n_head", "num_heads"),
        )
        if width is None or heads is None:
            raise ValueError("the config has neither head_dim nor hidden_size and num_attention_heads")
        head_size = width // heads
    head_size = int(head_size)
    explicit = fields.first("rotary_dim", "rotary_ndims")
    if explicit is not None:
        return head_size, int(explicit)
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind == "proportional":  # its factor leaves pairs still instead of leaving them out
        return head_size, head_size
    partial = next((v for v in map(parameters.get, _PARTIALS) if v is not None), None)
    if partial is None:
        partial = fields.first(*_PARTIALS)
    return head_size, int(head_size * (1.0 if partial is None else partial))


def _complete_longrope(scaling: dict[str, Any], fields: _Fields, limit: int | None) -> None:
    """Phi-3 keeps the original length beside its rope_scaling, and means the ratio of the lengths by its factor."""
    original = fields.get("original_max_position_embeddings")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    if scaling.get("factor") is None and limit is not None and original is not None:
        scaling["factor"] = limit / original


def _style(fields: _Fields) -> bool:
    interleave = fields.get("rope_interleave")
    if interleave is not None:
        return not interleave
    return fields.get("model_type") not in _GPTJ_STYLE
