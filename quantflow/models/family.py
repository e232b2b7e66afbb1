"""One row per family: what config.json and a trace of the model's forward do not say.

A model that transformers knows needs no row: `quantflow.models.discovery` runs its forward once and
finds which linears share an input. A row adds what no forward shows, and everything that knows a
family by name reads it here:

    quantflow.models.graph              the linears of a layer, without the trace (`traced` false)
    quantflow.models.architecture      the lean decoder's design of a layer (`decoder`)
    quantflow.models.model_tensors     names and shapes of all tensors, without a module
    quantflow.formats.llama_cpp         names and order of rows in a GGUF file (`gguf`)
    quantflow.distributed.sharding      which heads lie in which linear, so that heads go whole

The names of a layer's parts stand in a row once, by their role. A row is plain data: nothing here
imports torch or transformers, so that a command that reads a row starts in 0.04 s; the trace takes
3.8 s, nearly all of it for the import of transformers' model code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

# A fact that is always so, or a key of config.json that says it and what holds without that key.
BiasFlag = bool | tuple[str, bool]


@dataclass(frozen=True, kw_only=True)
class PartNames:
    """Names of a model's parts by their role, without `.weight`: inside a layer, or outside of all.

    Attributes:
        qkv: linears of queries, keys and values, or one linear of all three.
        output: attention's last linear.
        up: gate and up of the MLP, up alone where there is no gate, or one linear of both.
        down: the MLP's last linear.
        attention_norm: norm of what attention reads; None where there is none.
        attended_norm: norm of what attention adds to the hidden state; None where there is none.
        mlp_norm: norm of what the MLP reads; None where there is none.
        gated_norm: norm of what the MLP adds to the hidden state; None where there is none.
        q_norm, k_norm: norms of queries and of keys; None where there are none.
        sinks: a number for each query head, the score of a column without a value (a tensor of its
            own, with no `.weight`); None where there are none.
        layers: the list of decoder layers.
        embedding, norm, head: token embedding, last norm and head of the model.
        embedding_norm: norm of embeddings, before the first layer; None where there is none.
        positions: learned embedding of positions, added to that of tokens; None: there is none.
        embedding_linear, head_linear: linears from embeddings to the hidden state, and from it to
            what the head reads, where the two are of another width; None: there are none.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str | None = "input_layernorm"
    attended_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    gated_norm: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    sinks: str | None = None
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    embedding_norm: str | None = None
    positions: str | None = None
    embedding_linear: str | None = None
    head_linear: str | None = None

    @property
    def attention(self) -> str:
        """The attention module inside a layer, the one that writes the KV cache."""
        return self.output.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class FusedRows:
    """How the rows of one linear of queries, keys and values lie.

    They come in blocks of as many heads each: in a block all its queries, keys and values, a part
    after the other.

    Attributes:
        blocks: number of blocks; None: one for each kv head, with the queries that it serves.
        order: the parts of a block: q, k and v.
    """

    blocks: int | None = 1
    order: str = "qkv"


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The mixture of experts in the place of a sparse layer's MLP.

    Attributes:
        block: module of the mixture inside a layer, as the checkpoint calls it.
        place: the same module as transformers calls it.
        linears: gate, up and down linears of an expert.
        shared: linears that every token goes through beside the experts: gate and up, or one linear
            of both, then down; empty where there is no shared expert.
        shared_block: module inside a layer that holds them; None: the mixture's.
        routers: linears that decide which experts a token goes to, then how much the shared one
            counts; they are never quantized.
        linear_router: the first of them is a linear of transformers' module too, not a module of
            its own.
        correction: tensor inside the block that is added to the scores of experts where they are
            chosen, not where they are weighed (Wang et al. 2024, arXiv:2408.15664); None: nothing.
        correction_rows: axes of that tensor before the one of experts.
        biased: the router and the linears of experts have biases; the shared one has those of a
            dense layer.
    """

    block: str = "mlp"
    place: str = "mlp"
    linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: tuple[str, ...] = ()
    shared_block: str | None = None
    routers: tuple[str, ...] = ("gate",)
    linear_router: bool = False
    correction: str | None = None
    correction_rows: int = 0
    biased: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentNames:
    """Names inside a layer of the parts of multi-head latent attention, without `.weight`.

    `PartNames.qkv` has the linears that read the hidden state: queries, and the latent with the key
    that all heads share.

    Attributes:
        compressed: the first of those linears where queries are compressed.
        query_norm, query_up: norm of compressed queries, and their way to the heads.
        norm, up: norm of the latent, and the linear from it to keys and values.
    """

    compressed: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    norm: str = "self_attn.kv_a_layernorm"
    up: str = "self_attn.kv_b_proj"


@dataclass(frozen=True, kw_only=True)
class IndexerNames:
    """Names inside a layer of the indexer of sparse attention, without `.weight`.

    Attributes:
        queries: linear from compressed queries to those of the indexer's heads.
        key: linear from the hidden state to the key that these heads share.
        key_norm: norm of that key, which subtracts the mean and has a bias.
        weights: linear from the hidden state to how much each of the heads counts; it is never
            quantized.
    """

    queries: str = "self_attn.indexer.wq_b"
    key: str = "self_attn.indexer.wk"
    key_norm: str = "self_attn.indexer.k_norm"
    weights: str = "self_attn.indexer.weights_proj"


@dataclass(frozen=True, kw_only=True)
class DeltaNames:
    """Names inside a layer of the parts of a gated delta net, without `.weight`.

    It stands in the place of attention in the layers that `layer_types` calls linear_attention.

    Attributes:
        inputs: linears of queries, keys, values and output gates, or one linear of all.
        scores: linears of how much a token's value counts and of how much of the state stays, or
            one linear of both.
        convolution, norm, output: its convolution, norm and last linear.
        rate, shift: a number for each value head of how fast the state fades (tensors of their own,
            with no `.weight`).
        by_head: rows of the one linear come key head by key head, as Qwen3-Next has them.
        lightning: it is lightning attention, without convolution, scores and shift. The first of
            `inputs` has a head's query, key and value together, the second its gates; `rate` is a
            buffer that follows from the layer's number, as do those of `buffers`.
        buffers: those that transformers' module keeps beside.
    """

    inputs: tuple[str, ...]
    scores: tuple[str, ...]
    convolution: str = "linear_attn.conv1d"
    rate: str = "linear_attn.A_log"
    shift: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    output: str = "linear_attn.out_proj"
    by_head: bool = False
    lightning: bool = False
    buffers: tuple[str, ...] = ()


class Windows(Enum):
    """Rules that say which layers see a sliding window of `sliding_window` positions."""

    ALL_LAYERS = "every layer"
    ALL_LAYERS_IF_USED = "every layer, if use_sliding_window says so"
    AFTER_N_LAYERS = "if use_sliding_window says so: layer_types, else from max_window_layers on"
    EVEN_OF_FIRST_N = (
        "if use_sliding_window says so: layer_types, else every second before max_window_layers"
    )
    ALL_BUT_EVERY_NTH = "layer_types, else all layers but every sliding_window_pattern-th"
    LAYERS_WITHOUT_ROPE = (
        "if use_sliding_window says so: layer_types, else layers without a rotary embedding"
    )
    EVERY_OTHER = "layer_types, else the first layer and every second after it"
    NONE_OF_ATTENTION = "none, where layer_types says that all layers are attention"


class SparseLayers(Enum):
    """Rules that say which layers have experts in the place of their MLP."""

    ALL_LAYERS = "every layer"
    EVERY_NTH = "every decoder_sparse_step-th, but those of mlp_only_layers"
    AFTER_FIRST_K = "all but the first first_k_dense_replace"
    FROM_START_TO_END = (
        "every moe_layer_interval-th from moe_layer_start_index to moe_layer_end_index"
    )
    LISTED = "those of moe_layers, else every interleave_moe_layer_step-th"
    NAMED = "those that mlp_layer_types calls sparse, else all but the first"
    NAMED_OR_AFTER_FIRST_K = (
        "those that mlp_layer_types calls sparse, else all but the first first_k_dense_replace"
    )


class GroupScores(Enum):
    """How much a group of experts counts where some groups are chosen."""

    BEST_TWO = "the sum of its two best scores"
    BEST = "its best score"


class KvHeads(Enum):
    """Rules that say how many kv heads there are."""

    COUNTED = "num_key_value_heads, else one for each query head"
    EACH = "one for each query head"
    BY_GENERATION = (
        "num_kv_heads with new_decoder_architecture, one in all with multi_query, else one for "
        "each query head"
    )


class RouterScores(Enum):
    """How the router's logits become scores, of which the largest are chosen and weigh."""

    SOFTMAX = "exp(logit) over the sum of all experts' or of the chosen ones'"
    SIGMOID = "1 / (1 + exp(-logit))"
    SPARSE_MIXER = (
        "two experts, one after the other; each weighs its share among those whose logit is near"
    )
    SIGMOID_OF_CHOSEN = "the largest logits are chosen, and each weighs 1 / (1 + exp(-logit))"


@dataclass(frozen=True, kw_only=True)
class DecoderDesign:
    """How the lean decoder runs a family; what is not said is as in Llama.

    Attributes:
        defaults: transformers' defaults of the keys of config.json that are read.
        aliases: older name of a key -> the key.
        parts: keys whose tables hold keys of the model, which are read as `part.key`.
        supported_values: keys that may have this value alone, or be null.
        ignored_keys: keys that the family's own modules do not read.
        activation_aliases: activation in config.json -> the one that the family means by it.
        activation_key: key of the activation.
        activation: the activation where no key says it.
        mlp_size_key: key of the width of a dense layer's MLP; None: four times the hidden size.
        mlp_size_optional: the width is that too where the key has no value.
        clamped_swiglu: the MLP is gate * sigmoid(swiglu_alpha gate) * (up + 1), with gate and up
            clamped at swiglu_limit.
        eps_key: key of the norms' epsilon.
        eps: the norms' epsilon where no key says it; None: the key does.
        norm_bias: norms that subtract the mean have a bias.
        normalized_experts: whether the weights of a token's experts are divided by their sum, or
            the key that says it.
        least_expert_sum: the least that they are divided by, or the key that says it.
        experts_keys: keys of the number of experts; the first that is there counts, 0: none is
            sparse.
        chosen_key: key of the number of experts that a token goes to.
        expert_size_key: key of the width of an expert.
        shared_size_keys: keys whose product is the width of the shared expert; 0: there is none.
        sparse_layers: which layers have experts.
        router_scores: how logits become scores.
        expert_groups: the keys n_group and topk_group say in how many groups experts lie, and from
            how many of them a token's are chosen; a text: where the key topk_method has it.
        group_scores: how much a group counts.
        scaled_experts: the weights of experts are multiplied by routed_scaling_factor.
        scaled_expert_inputs: the weight of an expert multiplies what it reads, not what it puts
            out.
        windows: which layers have a sliding window; None where none has.
        chunked: layers that `layer_types` calls chunked_attention, else those with a rotary
            embedding, see the chunk of attention_chunk_size positions that a query lies in.
        tempered: queries of layers without a rotary embedding grow with their positions, if
            attn_temperature_tuning says so.
        kv_heads: how many kv heads there are.
        alibi: scores are lower the farther a position lies (ALiBi), and nothing is rotated; or the
            key that says it.
        rounded_alibi: slopes, positions and their products are rounded to bfloat16, and ALiBi comes
            before the factor of the scores (Falcon).
        position_offset: row of the embedding of positions that the first position has.
        rotates: queries and keys are rotated, unless `alibi`.
        rope_by_layer_type: sliding layers have a rotary embedding of their own.
        partial_rope: the rotary embedding may turn a part of a head alone; or the key of the
            number of features that it turns.
        theta_key: key of the base of the angles, which rope_parameters may say as well.
        theta: base of the angles where no key says anything of them but `partial_rope`, which is
            the key of a number then; None: keys do.
        grid_rope: rope_parameters say how the angles of an image's token are put together from
            three positions; those of text are equal, so it changes none.
        output_gate: the linear of queries also makes, after each head's query, a gate of as many
            features, by whose sigmoid the head's output is multiplied.
        rotary_pairs: neighbouring features of a head are rotated together, where other families
            rotate features half a head apart; or the key that says it.
        indexer_pairs: the indexer rotates neighbouring features together.
        shared_selections: keys say which layers have an indexer; the others' queries see the
            positions that those of the layer before them do.
        rope_where: a key, and the value with which there is a rotary embedding; None: there is one.
        no_rope_layers: the key `no_rope_layers` says which layers have no rotary embedding.
        query_pre_attn_scalar: scores are multiplied by query_pre_attn_scalar^-0.5, not by
            head_dim^-0.5.
        soft_caps: scores and logits may have a soft cap.
        multipliers: embedding, branches, scores and logits have multipliers, as Granite's.
        scaled_embedding: a token's embedding is multiplied by hidden_size^0.5.
        parallel_residual: the MLP reads the hidden state that attention reads, or the key that says
            it.
        replaced_norms: the norm of what a branch reads takes the place of the hidden state, to
            which the branch is added; keys have factors of the two (full_attn_alpha_factor and
            others).
        twin_norms: norms before attention and before the MLP where there are two beside each other.
            The keys new_decoder_architecture, parallel_attn and num_ln_in_parallel_attn say whether
            a layer has these, one norm for both, or one branch after the other (Falcon); None:
            there are no such keys.
        norm_before_key: key that is false where a norm is of the hidden state after attention or
            MLP was added, and takes its place (post-LN); None: norms are of what a branch reads.
        no_last_norm_key: key that is true where no norm comes before the head; None: one does.
        embedding_size_key: key of the width of embeddings; None or without a value: hidden_size.
        clip_key: key of the size at which queries, keys and values are clipped, behind norms of all
            heads and before the rotation; None: they are not.
        whole_qk_norms: norms of queries and keys are of all heads at once, not of each.
        qk_norm_key: key that says whether queries and keys have norms; None: their names do.
        unit_qk_norms: those norms have no weights, lie behind the rotation, and are in layers with
            a rotary embedding alone.
        qkv_bias, output_bias, mlp_bias, head_bias: which linears have a bias; `Mixture.biased` says
            it of experts and routers.
        tied: the head is the embedding where config.json has no `tie_word_embeddings`.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    supported_values: Mapping[str, Any] = field(default_factory=dict)
    ignored_keys: frozenset[str] = frozenset()
    activation_aliases: Mapping[str, str] = field(default_factory=dict)
    activation_key: str = "hidden_act"
    activation: str | None = None
    mlp_size_key: str | None = "intermediate_size"
    mlp_size_optional: bool = False
    clamped_swiglu: bool = False
    eps_key: str = "rms_norm_eps"
    eps: float | None = None
    norm_bias: bool = True
    normalized_experts: bool | str = "norm_topk_prob"
    least_expert_sum: float | str = 0.0
    experts_keys: tuple[str, ...] = ("num_local_experts", "num_experts")
    chosen_key: str = "num_experts_per_tok"
    expert_size_key: str = "moe_intermediate_size"
    shared_size_keys: tuple[str, ...] = ("shared_expert_intermediate_size",)
    sparse_layers: SparseLayers = SparseLayers.EVERY_NTH
    router_scores: RouterScores = RouterScores.SOFTMAX
    expert_groups: bool | str = False
    group_scores: GroupScores = GroupScores.BEST_TWO
    scaled_experts: bool = False
    scaled_expert_inputs: bool = False
    windows: Windows | None = None
    chunked: bool = False
    tempered: bool = False
    kv_heads: KvHeads = KvHeads.COUNTED
    alibi: bool | str = False
    rounded_alibi: bool = False
    position_offset: int = 0
    rotates: bool = True
    rope_by_layer_type: bool = False
    partial_rope: bool | str = False
    theta_key: str = "rope_theta"
    theta: float | None = None
    grid_rope: bool = False
    output_gate: bool = False
    rotary_pairs: bool | str = False
    indexer_pairs: bool = False
    shared_selections: bool = False
    rope_where: tuple[str, str] | None = None
    no_rope_layers: bool = False
    query_pre_attn_scalar: bool = False
    soft_caps: bool = False
    multipliers: bool = False
    scaled_embedding: bool = False
    parallel_residual: bool | str = False
    replaced_norms: bool = False
    twin_norms: tuple[str, str] | None = None
    norm_before_key: str | None = None
    no_last_norm_key: str | None = None
    embedding_size_key: str | None = None
    clip_key: str | None = None
    whole_qk_norms: bool = False
    qk_norm_key: str | None = None
    unit_qk_norms: bool = False
    qkv_bias: BiasFlag = ("attention_bias", False)
    output_bias: BiasFlag = ("attention_bias", False)
    mlp_bias: BiasFlag = False
    head_bias: BiasFlag = False
    tied: bool = False


@dataclass(frozen=True, kw_only=True)
class GgufDesign:
    """How llama.cpp has a family in a GGUF file.

    Attributes:
        architecture: value of `general.architecture`; several families may share one.
        names: llama.cpp's names of the parts, `layers` being the word before a layer's number.
        rotary_pairs: llama.cpp rotates neighbouring rows of a head together, where transformers
            rotates rows half a head apart; so rows of queries and keys are written in pairs.
        biased: roles, of `PartNames`, whose linears have a bias in every model.
        may_be_biased: roles whose linears llama.cpp runs with and without a bias.
        may_be_tied: llama.cpp takes the embedding for a head that the file does not have.
        activations: values of config.json's activation that llama.cpp computes; the first is what a
            file means.
    """

    architecture: str
    names: PartNames
    rotary_pairs: bool = False
    biased: frozenset[str] = frozenset()
    may_be_biased: frozenset[str] = frozenset()
    may_be_tied: bool = True
    activations: tuple[str, ...] = ("silu",)


@dataclass(frozen=True, kw_only=True)
class FamilyRow:
    """One model type of transformers.

    Attributes:
        model_type, architecture: the type and its causal language model, as config.json names them.
        text_of: type whose `text_config` is this type, beside one of what it sees; its text alone
            runs as this row says.
        text_names: how names of `names` begin that have another beginning in `text_of`, and that
            one.
        read_as: type of transformers whose modules are this type's, which transformers knows by
            code beside the weights alone; None: it knows the type itself.
        names: names of the parts, in the checkpoint.
        mixture: mixture of experts in the layers that config.json makes sparse; None in a dense
            family.
        gated: the MLP is activation(gate) * up, else activation(up).
        centered: norms subtract the mean and have a bias (LayerNorm), else neither (RMSNorm); there
            is no bias where `DecoderDesign.norm_bias` says so.
        unit_offset: norms multiply by 1 + their weight, so no factor can be folded into it.
        fused: how the rows of the one linear of queries, keys and values lie, if there is one.
        latent: the attention is multi-head latent attention with these parts; None: it is not.
        indexer: an indexer with these parts chooses the positions that a query of latent attention
            sees; None: it sees all before it.
        delta: gated delta nets stand in the place of attention in some layers; None: in none.
        traced: the linears of a layer come from a trace of the model's forward, not from this row.
        decoder: how the lean decoder runs it; None leaves it to transformers' modules.
        gguf: how llama.cpp has it in a file; None where export to GGUF refuses it. It needs
            `decoder`, whose keys of config.json it shares.
    """

    model_type: str
    architecture: str
    read_as: str | None = None
    text_of: str | None = None
    text_names: tuple[str, str] = ("model.", "model.language_model.")
    names: PartNames = PartNames()
    mixture: Mixture | None = None
    gated: bool = True
    centered: bool = False
    unit_offset: bool = False
    fused: FusedRows = FusedRows()
    latent: LatentNames | None = None
    indexer: IndexerNames | None = None
    delta: DeltaNames | None = None
    traced: bool = False
    decoder: DecoderDesign | None = None
    gguf: GgufDesign | None = None

    @property
    def unrotated(self) -> str | None:
        """The reason why a Hadamard rotation does not commute with the family's norms, or None.

        It commutes with an RMSNorm of what a branch reads, whose weight is folded into the linears
        and routers of that branch. The words follow `the norms of family ...`.
        """
        if self.centered:
            return "subtract the mean, which no rotation commutes with"
        if self.names.attended_norm or self.names.gated_norm:
            return "multiply channels of what is added to the hidden state, behind all linears"
        if self.decoder is not None and self.decoder.replaced_norms:
            return "take the place of the hidden state, so their weights fold into no linear"
        return None


# each kv head's queries, key and value lie together
BY_HEAD = FusedRows(blocks=None)


def attention_heads(row: FamilyRow) -> dict[str, tuple[str, int]]:
    """Heads along the axis on which each linear of an attention is cut: name -> (key, multiple).

    The key of config.json counts the heads; each takes a multiple of head_dim. One linear of
    queries, keys and values has such heads where each head's three lie together, else it is not
    among them.
    """
    heads = {row.names.output: ("num_attention_heads", 1)}
    if len(row.names.qkv) == 3:
        queries, *keys_and_values = row.names.qkv
        if row.decoder is None or not row.decoder.output_gate:  # which lie between its queries
            heads[queries] = ("num_attention_heads", 1)
        heads |= dict.fromkeys(keys_and_values, ("num_key_value_heads", 1))
    elif row.fused == BY_HEAD and row.decoder and row.decoder.kv_heads is KvHeads.EACH:
        heads[row.names.qkv[0]] = ("num_attention_heads", 3)
    return heads


_RMS_NORM: Mapping[str, Any] = MappingProxyType(
    {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
)
_LAYER_NORM: Mapping[str, Any] = MappingProxyType(
    {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "rope_theta": 10000.0}
)
_QWEN: Mapping[str, Any] = MappingProxyType(
    {**_RMS_NORM, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
)
_MLP_BIAS = ("mlp_bias", False)
_HEAD_NORMS = PartNames(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
_MIXTRAL = Mixture(block="block_sparse_moe", linears=("w1", "w3", "w2"))
_SHARED = ("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj")
_GRANITE_MULTIPLIERS: Mapping[str, Any] = MappingProxyType(
    {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    }
)
_GRANITE_MIXTURE = Mixture(
    block="block_sparse_moe", place="block_sparse_moe", routers=("router.layer",)
)
_GRANITE_SHARED = replace(
    _GRANITE_MIXTURE, shared=("input_linear", "output_linear"), shared_block="shared_mlp"
)
_GRANITE_MOE_DECODER = DecoderDesign(
    defaults={
        **_RMS_NORM,
        **_GRANITE_MULTIPLIERS,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    normalized_experts=True,
    experts_keys=("num_local_experts",),
    expert_size_key="intermediate_size",
    multipliers=True,
)
_LATENT = PartNames(qkv=("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"))
_DEEPSEEK: Mapping[str, Any] = MappingProxyType(
    {
        **_RMS_NORM,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
)
# the sum of two sizes above, and what concerns training alone
_LATENT_IGNORED = frozenset({"qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux"})
_DEEPSEEK_V3_MIXTURE = Mixture(shared=_SHARED, correction="gate.e_score_correction_bias")
_DEEPSEEK_V3: Mapping[str, Any] = MappingProxyType(
    {
        **_DEEPSEEK,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
)
_DEEPSEEK_V3_DECODER = DecoderDesign(
    defaults={**_DEEPSEEK_V3, "rope_interleave": True},
    supported_values={
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    ignored_keys=_LATENT_IGNORED | {"num_nextn_predict_layers", "num_mtp_layers"},
    least_expert_sum=1e-20,
    experts_keys=("n_routed_experts", "num_local_experts"),
    shared_size_keys=("moe_intermediate_size", "n_shared_experts"),
    sparse_layers=SparseLayers.AFTER_FIRST_K,
    router_scores=RouterScores.SIGMOID,
    expert_groups=True,
    scaled_experts=True,
    rotary_pairs="rope_interleave",
)
_DEEPSEEK_V32_DECODER = replace(
    _DEEPSEEK_V3_DECODER,
    defaults={
        **_DEEPSEEK_V3,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
    },
    supported_values={**_DEEPSEEK_V3_DECODER.supported_values, "rope_interleave": True},
    sparse_layers=SparseLayers.NAMED_OR_AFTER_FIRST_K,
    rotary_pairs=True,
)
_QWEN_SHARED = Mixture(
    shared=("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"),
    routers=("gate", "shared_expert_gate"),
)
_DELTA: Mapping[str, Any] = MappingProxyType(
    {
        **_RMS_NORM,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "full_attention_interval": 4,
    }
)
_QWEN35_DELTA = DeltaNames(
    inputs=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    scores=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
)
_QWEN35_DECODER = DecoderDesign(
    defaults={**_DELTA, "num_key_value_heads": 4},
    # the module computes in float32 whatever the key says; layers beyond the last predict further
    # tokens
    ignored_keys=frozenset(
        {
            "mamba_ssm_dtype",
            "mlp_only_layers",
            "mtp_num_hidden_layers",
            "mtp_use_dedicated_embeddings",
        }
    ),
    supported_values={"attn_output_gate": True},
    partial_rope=True,
    grid_rope=True,
    output_gate=True,
)
_GPT_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    }
)
# of training, of tokenizers, and of heads beside the language model's
_GPT_IGNORED = frozenset(
    {
        "attn_pdrop",
        "gradient_checkpointing",
        "n_ctx",
        "n_special",
        "predict_special_tokens",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "tokenizer_class",
    }
)
_GPT2_NAMES = PartNames(
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    layers="transformer.h",
    embedding="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
)
_GPTJ_NAMES = PartNames(
    output="attn.out_proj",
    up=("mlp.fc_in",),
    down="mlp.fc_out",
    attention_norm="ln_1",
    mlp_norm="ln_1",
    layers="transformer.h",
    embedding="transformer.wte",
    norm="transformer.ln_f",
)
_GPTJ_DECODER = DecoderDesign(
    defaults={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "rotary_dim": 64,
    },
    aliases=_GPT_ALIASES,
    ignored_keys=_GPT_IGNORED | {"rotary", "scale_attn_weights"},
    activation_key="activation_function",
    mlp_size_key="n_inner",
    mlp_size_optional=True,
    eps_key="layer_norm_epsilon",
    kv_heads=KvHeads.EACH,
    partial_rope="rotary_dim",
    theta=10000.0,
    rotary_pairs=True,
    parallel_residual=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=True,
    head_bias=True,
)
_SANDWICH = PartNames(
    attended_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    gated_norm="post_feedforward_layernorm",
)
_GGUF_NAMES = PartNames(
    qkv=("attn_q", "attn_k", "attn_v"),
    output="attn_output",
    up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    attention_norm="attn_norm",
    mlp_norm="ffn_norm",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    layers="blk",
    embedding="token_embd",
    norm="output_norm",
    head="output",
)
_LINEARS = frozenset({"qkv", "output", "up", "down"})
_NORMS = frozenset({"attention_norm", "mlp_norm", "norm"})
_LLAMA_GGUF = GgufDesign(
    architecture="llama", names=_GGUF_NAMES, rotary_pairs=True, may_be_biased=_LINEARS
)
_GEMMA_DECODER = DecoderDesign(
    defaults={
        **_RMS_NORM,
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": 256,
        "num_key_value_heads": 16,
    },
    supported_values={"use_bidirectional_attention": False},
    ignored_keys=frozenset({"hidden_activation"}),
    activation_aliases={"gelu": "gelu_pytorch_tanh"},  # the first configurations said gelu
    scaled_embedding=True,
    tied=True,
)
_GEMMA2_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
)
_GEMMA2_DECODER = replace(
    _GEMMA_DECODER,
    defaults=_GEMMA2_DEFAULTS,
    ignored_keys=frozenset({"hidden_act"}),
    activation_aliases={},
    activation_key="hidden_activation",
    windows=Windows.ALL_BUT_EVERY_NTH,
    query_pre_attn_scalar=True,
    soft_caps=True,
)

# The order of the rows is the order in which messages list families.
FAMILIES: Mapping[str, FamilyRow] = MappingProxyType(
    {
        row.model_type: row
        for row in (
            FamilyRow(
                model_type="llama",
                architecture="LlamaForCausalLM",
                decoder=DecoderDesign(
                    defaults=_RMS_NORM,
                    ignored_keys=frozenset({"is_llama_config"}),
                    supported_values={"rope_interleaved": False},
                    mlp_bias=_MLP_BIAS,
                ),
                gguf=_LLAMA_GGUF,
            ),
            FamilyRow(
                model_type="mistral",
                architecture="MistralForCausalLM",
                decoder=DecoderDesign(
                    defaults={**_RMS_NORM, "sliding_window": 4096, "num_key_value_heads": 8},
                    windows=Windows.ALL_LAYERS,
                    qkv_bias=False,
                    output_bias=False,
                ),
                gguf=_LLAMA_GGUF,
            ),
            FamilyRow(
                model_type="qwen2",
                architecture="Qwen2ForCausalLM",
                decoder=DecoderDesign(
                    supported_values={"use_mrope": False},
                    defaults={**_QWEN, "num_key_value_heads": 32},
                    windows=Windows.AFTER_N_LAYERS,
                    qkv_bias=True,
                    output_bias=False,
                ),
                gguf=GgufDesign(architecture="qwen2", names=_GGUF_NAMES, biased=frozenset({"qkv"})),
            ),
            FamilyRow(
                model_type="qwen3",
                architecture="Qwen3ForCausalLM",
                names=_HEAD_NORMS,
                decoder=DecoderDesign(
                    defaults={**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
                    windows=Windows.AFTER_N_LAYERS,
                ),
                gguf=GgufDesign(architecture="qwen3", names=_GGUF_NAMES),
            ),
            # The norms feed the same linears with and without use_parallel_residual; only what is
            # added to the result differs.
            FamilyRow(
                model_type="gpt_neox",
                architecture="GPTNeoXForCausalLM",
                names=PartNames(
                    qkv=("attention.query_key_value",),
                    output="attention.dense",
                    up=("mlp.dense_h_to_4h",),
                    down="mlp.dense_4h_to_h",
                    layers="gpt_neox.layers",
                    embedding="gpt_neox.embed_in",
                    norm="gpt_neox.final_layer_norm",
                    head="embed_out",
                ),
                gated=False,
                centered=True,
                fused=BY_HEAD,
                decoder=DecoderDesign(
                    defaults={
                        **_LAYER_NORM,
                        "partial_rotary_factor": 0.25,
                        "use_parallel_residual": True,
                    },
                    kv_heads=KvHeads.EACH,
                    eps_key="layer_norm_eps",
                    partial_rope=True,
                    parallel_residual="use_parallel_residual",
                    qkv_bias=("attention_bias", True),
                    output_bias=("attention_bias", True),
                    mlp_bias=True,
                ),
                gguf=GgufDesign(
                    architecture="gptneox",
                    names=replace(_GGUF_NAMES, qkv=("attn_qkv",), up=("ffn_up",)),
                    biased=_LINEARS | _NORMS,
                    may_be_tied=False,
                    activations=("gelu", "gelu_new", "gelu_fast"),
                ),
            ),
            FamilyRow(
                model_type="mixtral",
                architecture="MixtralForCausalLM",
                mixture=_MIXTRAL,
                decoder=DecoderDesign(
                    defaults={
                        **_RMS_NORM,
                        "rms_norm_eps": 1e-5,
                        "rope_theta": 1000000.0,
                        "num_key_value_heads": 8,
                        "num_local_experts": 8,
                        "num_experts_per_tok": 2,
                    },
                    ignored_keys=frozenset({"router_jitter_noise"}),  # of training
                    windows=Windows.ALL_LAYERS,
                    normalized_experts=True,
                    expert_size_key="intermediate_size",
                    qkv_bias=False,
                    output_bias=False,
                ),
            ),
            # The shared expert reads what the experts and the router read; its own gate is a row
            # that says how much it counts.
            FamilyRow(
                model_type="qwen2_moe",
                architecture="Qwen2MoeForCausalLM",
                mixture=_QWEN_SHARED,
                decoder=DecoderDesign(
                    defaults={
                        **_QWEN,
                        "num_key_value_heads": 16,
                        "num_experts": 60,
                        "num_experts_per_tok": 4,
                    },
                    windows=Windows.EVEN_OF_FIRST_N,
                    qkv_bias=("qkv_bias", True),
                    output_bias=False,
                ),
            ),
            FamilyRow(
                model_type="qwen3_moe",
                architecture="Qwen3MoeForCausalLM",
                names=_HEAD_NORMS,
                mixture=Mixture(),
                decoder=DecoderDesign(
                    ignored_keys=frozenset({"max_window_layers"}),
                    defaults={
                        **_RMS_NORM,
                        "sliding_window": 4096,
                        "use_sliding_window": False,
                        "num_key_value_heads": 4,
                        "num_experts": 128,
                        "num_experts_per_tok": 8,
                    },
                    windows=Windows.ALL_LAYERS_IF_USED,
                ),
            ),
            FamilyRow(
                model_type="olmoe",
                architecture="OlmoeForCausalLM",
                names=_HEAD_NORMS,
                mixture=Mixture(),
                decoder=DecoderDesign(
                    defaults={
                        **_RMS_NORM,
                        "rms_norm_eps": 1e-5,
                        "num_experts": 64,
                        "num_experts_per_tok": 8,
                    },
                    expert_size_key="intermediate_size",
                    clip_key="clip_qkv",
                    whole_qk_norms=True,
                ),
            ),
            # Its experts lie in three tensors. The graph's names are those of the linears.
            FamilyRow(
                model_type="dbrx",
                architecture="DbrxForCausalLM",
                names=PartNames(
                    qkv=("norm_attn_norm.attn.Wqkv",),
                    output="norm_attn_norm.attn.out_proj",
                    attention_norm="norm_attn_norm.norm_1",
                    mlp_norm="norm_attn_norm.norm_2",
                    layers="transformer.blocks",
                    embedding="transformer.wte",
                    norm="transformer.norm_f",
                ),
                mixture=Mixture(
                    block="ffn",
                    place="ffn",
                    linears=("w1", "v1", "w2"),
                    routers=("router.layer",),
                    linear_router=True,
                ),
                centered=True,
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        "num_key_value_heads": 1,
                        "ffn_config.ffn_act_fn.name": "silu",
                        "ffn_config.ffn_hidden_size": 3584,
                        "ffn_config.moe_num_experts": 4,
                        "ffn_config.moe_top_k": 1,
                        "ffn_config.moe_normalize_expert_weights": 1.0,
                        "max_position_embeddings": 2048,
                    },
                    aliases={
                        "n_layers": "num_hidden_layers",
                        "n_heads": "num_attention_heads",
                        "d_model": "hidden_size",
                        "max_seq_len": "max_position_embeddings",
                        "attn_config.kv_n_heads": "num_key_value_heads",
                    },
                    parts=("attn_config", "ffn_config"),
                    supported_values={"ffn_config.moe_normalize_expert_weights": 1.0},
                    # of training, and the width of the model once more, which no module reads
                    ignored_keys=frozenset(
                        {
                            "attn_config.attn_pdrop",
                            "ffn_config.hidden_size",
                            "ffn_config.moe_jitter_eps",
                            "ffn_config.moe_loss_weight",
                        }
                    ),
                    activation_key="ffn_config.ffn_act_fn.name",
                    eps=1e-5,
                    norm_bias=False,
                    normalized_experts="ffn_config.moe_normalize_expert_weights",
                    experts_keys=("ffn_config.moe_num_experts",),
                    chosen_key="ffn_config.moe_top_k",
                    expert_size_key="ffn_config.ffn_hidden_size",
                    sparse_layers=SparseLayers.ALL_LAYERS,
                    theta_key="attn_config.rope_theta",
                    clip_key="attn_config.clip_qkv",
                    qkv_bias=False,
                    output_bias=False,
                ),
            ),
            # Experts lie in two tensors of a layer. The graph's names are those of the linears.
            FamilyRow(
                model_type="llama4_text",
                architecture="Llama4ForCausalLM",
                text_of="llama4",
                text_names=("", "language_model."),
                names=PartNames(
                    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
                    down="feed_forward.down_proj",
                ),
                mixture=Mixture(
                    block="feed_forward",
                    place="feed_forward",
                    shared=_QWEN_SHARED.shared,
                    routers=("router",),
                    linear_router=True,
                ),
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        **_RMS_NORM,
                        "rms_norm_eps": 1e-5,
                        "rope_theta": 500000.0,
                        "head_dim": 128,
                        "num_key_value_heads": 8,
                        "num_local_experts": 16,
                        "num_experts_per_tok": 1,
                        "interleave_moe_layer_step": 1,
                        "intermediate_size_mlp": 16384,
                        "use_qk_norm": True,
                        "no_rope_layer_interval": 4,
                        "attention_chunk_size": 8192,
                        "attn_temperature_tuning": True,
                        "floor_scale": 8192,
                        "attn_scale": 0.1,
                    },
                    # of training, and of another program
                    ignored_keys=frozenset({"router_jitter_noise", "for_llm_compressor"}),
                    mlp_size_key="intermediate_size_mlp",
                    normalized_experts=False,
                    expert_size_key="intermediate_size",
                    shared_size_keys=("intermediate_size",),
                    sparse_layers=SparseLayers.LISTED,
                    router_scores=RouterScores.SIGMOID_OF_CHOSEN,
                    scaled_expert_inputs=True,
                    chunked=True,
                    tempered=True,
                    rotary_pairs=True,
                    no_rope_layers=True,
                    qk_norm_key="use_qk_norm",
                    unit_qk_norms=True,
                ),
            ),
            # Its checkpoint has one tensor for gate and up of all experts, row by row in turns. The
            # graph's names are those of the linears.
            FamilyRow(
                model_type="gpt_oss",
                architecture="GptOssForCausalLM",
                names=PartNames(sinks="self_attn.sinks"),
                mixture=Mixture(routers=("router",), biased=True),
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        **_RMS_NORM,
                        "rms_norm_eps": 1e-5,
                        "rope_theta": 150000.0,
                        "head_dim": 64,
                        "num_key_value_heads": 8,
                        "sliding_window": 128,
                        "swiglu_alpha": 1.702,
                        "swiglu_limit": 7.0,
                        "num_local_experts": 128,
                        "num_experts_per_tok": 4,
                    },
                    # names of other programs for keys that are there, and a gate that is its own
                    ignored_keys=frozenset(
                        {"experts_per_token", "initial_context_length", "hidden_act"}
                    ),
                    clamped_swiglu=True,
                    normalized_experts=True,
                    expert_size_key="intermediate_size",
                    windows=Windows.EVERY_OTHER,
                    qkv_bias=("attention_bias", True),
                    output_bias=("attention_bias", True),
                ),
            ),
            # GLM-4.5 and 4.6; layers beyond the last predict further tokens, and are not run.
            FamilyRow(
                model_type="glm4_moe",
                architecture="Glm4MoeForCausalLM",
                names=_HEAD_NORMS,
                mixture=Mixture(shared=_SHARED, correction="gate.e_score_correction_bias"),
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        **_RMS_NORM,
                        "rms_norm_eps": 1e-5,
                        "num_key_value_heads": 8,
                        "partial_rotary_factor": 0.5,
                        "n_routed_experts": 128,
                        "n_shared_experts": 1,
                        "num_experts_per_tok": 8,
                        "first_k_dense_replace": 1,
                        "n_group": 1,
                        "topk_group": 1,
                        "norm_topk_prob": True,
                        "routed_scaling_factor": 1.0,
                        "use_qk_norm": False,
                    },
                    ignored_keys=frozenset({"num_nextn_predict_layers", "num_mtp_layers"}),
                    least_expert_sum=1e-20,
                    experts_keys=("n_routed_experts",),
                    shared_size_keys=("moe_intermediate_size", "n_shared_experts"),
                    sparse_layers=SparseLayers.AFTER_FIRST_K,
                    router_scores=RouterScores.SIGMOID,
                    expert_groups=True,
                    scaled_experts=True,
                    partial_rope=True,
                    qk_norm_key="use_qk_norm",
                    output_bias=False,
                ),
            ),
            # MiniMax-Text-01 and M1 as transformers writes them: lightning attention between layers
            # of softmax attention.
            FamilyRow(
                model_type="minimax",
                architecture="MiniMaxForCausalLM",
                mixture=_MIXTRAL,
                delta=DeltaNames(
                    inputs=("self_attn.qkv_proj", "self_attn.output_gate"),
                    scores=(),
                    rate="self_attn.slope_rate",
                    norm="self_attn.norm",
                    output="self_attn.out_proj",
                    lightning=True,
                    buffers=(
                        "self_attn.query_decay",
                        "self_attn.key_decay",
                        "self_attn.diagonal_decay",
                    ),
                ),
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        **_RMS_NORM,
                        "rms_norm_eps": 1e-5,
                        "rope_theta": 1000000.0,
                        "num_key_value_heads": 8,
                        "num_local_experts": 8,
                        "num_experts_per_tok": 2,
                        "block_size": 256,
                        "full_attn_alpha_factor": 1,
                        "full_attn_beta_factor": 1,
                        "linear_attn_alpha_factor": 1,
                        "linear_attn_beta_factor": 1,
                        "mlp_alpha_factor": 1,
                        "mlp_beta_factor": 1,
                    },
                    supported_values={"sliding_window": None},
                    # of training; and of how transformers' module puts columns together
                    ignored_keys=frozenset({"router_jitter_noise", "block_size"}),
                    normalized_experts=True,
                    expert_size_key="intermediate_size",
                    sparse_layers=SparseLayers.ALL_LAYERS,
                    replaced_norms=True,
                    qkv_bias=False,
                    output_bias=False,
                ),
            ),
            FamilyRow(
                model_type="minimax_m2",
                architecture="MiniMaxM2ForCausalLM",
                names=_HEAD_NORMS,
                mixture=replace(_MIXTRAL, correction="e_score_correction_bias"),
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        **_RMS_NORM,
                        "rope_theta": 5000000.0,
                        "head_dim": 128,
                        "num_key_value_heads": 8,
                        "num_local_experts": 256,
                        "num_experts_per_tok": 8,
                    },
                    supported_values={
                        "scoring_func": "sigmoid",
                        "use_qk_norm": True,
                        "qk_norm_type": "per_layer",
                        "use_routing_bias": True,
                        "shared_intermediate_size": 0,
                        "sliding_window": None,
                    },
                    # of the family before it, whose file it took over, and of layers beyond the
                    # last, which predict further tokens
                    ignored_keys=frozenset(
                        {
                            "attn_type_list",
                            "layernorm_full_attention_beta",
                            "layernorm_linear_attention_beta",
                            "layernorm_mlp_beta",
                            "mlp_intermediate_size",
                            "mtp_transformer_layers",
                            "num_mtp_modules",
                            "router_jitter_noise",
                            "shared_moe_mode",
                            "use_mtp",
                        }
                    ),
                    normalized_experts=True,
                    expert_size_key="intermediate_size",
                    router_scores=RouterScores.SIGMOID,
                    partial_rope="rotary_dim",
                    whole_qk_norms=True,
                    qkv_bias=False,
                    output_bias=False,
                ),
            ),
            FamilyRow(
                model_type="ernie4_5_moe",
                architecture="Ernie4_5_MoeForCausalLM",
                mixture=Mixture(
                    shared=_SHARED,
                    correction="moe_statics.e_score_correction_bias",
                    correction_rows=1,
                ),
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        **_RMS_NORM,
                        "rms_norm_eps": 1e-5,
                        "rope_theta": 500000.0,
                        "num_key_value_heads": 4,
                        "moe_num_experts": 64,
                        "moe_k": 6,
                        "moe_num_shared_experts": 2,
                        "moe_layer_start_index": 1,
                        "moe_layer_interval": 1,
                        "moe_norm_min": 1e-12,
                    },
                    supported_values={"moe_gate": "topk", "moe_use_aux_free": True},
                    # what experts may take in training, and layers that predict further tokens
                    ignored_keys=frozenset({"moe_capacity", "num_nextn_predict_layers"}),
                    normalized_experts=True,
                    least_expert_sum="moe_norm_min",
                    experts_keys=("moe_num_experts", "num_experts"),
                    chosen_key="moe_k",
                    shared_size_keys=("moe_intermediate_size", "moe_num_shared_experts"),
                    sparse_layers=SparseLayers.FROM_START_TO_END,
                    rotary_pairs=True,
                    qkv_bias=("use_bias", False),
                    output_bias=("use_bias", False),
                    mlp_bias=("use_bias", False),
                    head_bias=("use_bias", False),
                    tied=True,
                ),
            ),
            FamilyRow(
                model_type="granitemoe",
                architecture="GraniteMoeForCausalLM",
                mixture=_GRANITE_MIXTURE,
                traced=True,
                decoder=_GRANITE_MOE_DECODER,
            ),
            FamilyRow(
                model_type="granitemoeshared",
                architecture="GraniteMoeSharedForCausalLM",
                mixture=_GRANITE_SHARED,
                traced=True,
                decoder=replace(
                    _GRANITE_MOE_DECODER,
                    defaults={**_GRANITE_MOE_DECODER.defaults, "shared_intermediate_size": 0},
                    shared_size_keys=("shared_intermediate_size",),
                ),
            ),
            # Granite 4 without Mamba: where there are no experts, what they share is the MLP.
            FamilyRow(
                model_type="granitemoehybrid",
                architecture="GraniteMoeHybridForCausalLM",
                names=PartNames(up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
                mixture=_GRANITE_SHARED,
                traced=True,
                decoder=replace(
                    _GRANITE_MOE_DECODER,
                    defaults={
                        **_GRANITE_MOE_DECODER.defaults,
                        "shared_intermediate_size": 1024,
                    },
                    ignored_keys=frozenset(
                        {
                            "init_method",
                            "mamba_chunk_size",
                            "mamba_conv_bias",
                            "mamba_d_conv",
                            "mamba_d_head",
                            "mamba_d_state",
                            "mamba_expand",
                            "mamba_n_groups",
                            "mamba_n_heads",
                            "mamba_proj_bias",
                            "time_step_limit",
                        }
                    ),
                    supported_values={"normalization_function": "rmsnorm"},
                    mlp_size_key="shared_intermediate_size",
                    shared_size_keys=("shared_intermediate_size",),
                    windows=Windows.NONE_OF_ATTENTION,
                    rope_where=("position_embedding_type", "rope"),
                ),
            ),
            FamilyRow(
                model_type="phimoe",
                architecture="PhimoeForCausalLM",
                mixture=_MIXTRAL,
                centered=True,
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        **_RMS_NORM,
                        "rms_norm_eps": 1e-5,
                        "rope_theta": 1000000.0,
                        "num_key_value_heads": 8,
                        "num_local_experts": 16,
                        "num_experts_per_tok": 2,
                        "router_jitter_noise": 0.01,
                    },
                    ignored_keys=frozenset({"input_jitter_noise"}),
                    supported_values={"num_experts_per_tok": 2},
                    normalized_experts=False,
                    expert_size_key="intermediate_size",
                    router_scores=RouterScores.SPARSE_MIXER,
                    windows=Windows.ALL_LAYERS,
                    head_bias=("lm_head_bias", False),
                ),
            ),
            FamilyRow(
                model_type="deepseek_v2",
                architecture="DeepseekV2ForCausalLM",
                names=_LATENT,
                latent=LatentNames(),
                mixture=Mixture(shared=_SHARED),
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        **_DEEPSEEK,
                        "n_routed_experts": 64,
                        "n_shared_experts": 2,
                        "first_k_dense_replace": 0,
                        "routed_scaling_factor": 1.0,
                        "topk_method": "greedy",
                    },
                    # transformers divides no weights, whatever norm_topk_prob says
                    supported_values={
                        "norm_topk_prob": False,
                        "scoring_func": "softmax",
                        "moe_layer_freq": 1,
                    },
                    ignored_keys=_LATENT_IGNORED,
                    normalized_experts=False,
                    experts_keys=("n_routed_experts", "num_experts"),
                    shared_size_keys=("moe_intermediate_size", "n_shared_experts"),
                    sparse_layers=SparseLayers.AFTER_FIRST_K,
                    expert_groups="group_limited_greedy",
                    group_scores=GroupScores.BEST,
                    scaled_experts=True,
                    rotary_pairs=True,
                    mlp_bias=_MLP_BIAS,
                ),
            ),
            # DeepSeek V3 and R1. Layers beyond the last predict further tokens.
            FamilyRow(
                model_type="deepseek_v3",
                architecture="DeepseekV3ForCausalLM",
                names=_LATENT,
                latent=LatentNames(),
                mixture=_DEEPSEEK_V3_MIXTURE,
                traced=True,
                decoder=_DEEPSEEK_V3_DECODER,
            ),
            # Kimi K2, whose code beside the weights is DeepSeek's.
            FamilyRow(
                model_type="kimi_k2",
                architecture="DeepseekV3ForCausalLM",
                read_as="deepseek_v3",
                names=_LATENT,
                latent=LatentNames(),
                mixture=_DEEPSEEK_V3_MIXTURE,
                traced=True,
                decoder=_DEEPSEEK_V3_DECODER,
            ),
            # GLM-4.7-Flash: DeepSeek's attention and router. Layers beyond the last predict further
            # tokens.
            FamilyRow(
                model_type="glm4_moe_lite",
                architecture="Glm4MoeLiteForCausalLM",
                names=_LATENT,
                latent=LatentNames(),
                mixture=_DEEPSEEK_V3_MIXTURE,
                traced=True,
                decoder=replace(
                    _DEEPSEEK_V3_DECODER,
                    defaults={
                        **_DEEPSEEK,
                        "rms_norm_eps": 1e-5,
                        "q_lora_rank": 768,
                        "qk_nope_head_dim": 192,
                        "v_head_dim": 256,
                        "n_routed_experts": 64,
                        "n_shared_experts": 1,
                        "num_experts_per_tok": 4,
                        "n_group": 1,
                        "topk_group": 1,
                        "norm_topk_prob": True,
                        "routed_scaling_factor": 1.8,
                        "rope_interleave": True,
                    },
                    # the module reads mlp_layer_types alone
                    supported_values={
                        **_DEEPSEEK_V3_DECODER.supported_values,
                        "first_k_dense_replace": 1,
                        "partial_rotary_factor": 1.0,
                    },
                    sparse_layers=SparseLayers.NAMED,
                ),
            ),
            # DeepSeek V3.2 and GLM-5: DeepSeek V3 with sparse attention. Layers beyond the last
            # predict further tokens.
            FamilyRow(
                model_type="deepseek_v32",
                architecture="DeepseekV32ForCausalLM",
                names=_LATENT,
                latent=LatentNames(),
                indexer=IndexerNames(),
                mixture=_DEEPSEEK_V3_MIXTURE,
                traced=True,
                decoder=_DEEPSEEK_V32_DECODER,
            ),
            FamilyRow(
                model_type="glm_moe_dsa",
                architecture="GlmMoeDsaForCausalLM",
                names=_LATENT,
                latent=LatentNames(),
                indexer=IndexerNames(),
                mixture=_DEEPSEEK_V3_MIXTURE,
                traced=True,
                decoder=replace(
                    _DEEPSEEK_V32_DECODER,
                    defaults={
                        **_DEEPSEEK_V32_DECODER.defaults,
                        "rms_norm_eps": 1e-5,
                        "q_lora_rank": 2048,
                        "qk_nope_head_dim": 192,
                        "v_head_dim": 256,
                        "n_group": 1,
                        "topk_group": 1,
                        "index_n_heads": 32,
                    },
                    supported_values={
                        **_DEEPSEEK_V32_DECODER.supported_values,
                        "indexer_rope_interleave": True,
                    },
                    indexer_pairs=True,
                    shared_selections=True,
                ),
            ),
            # Three layers of four are gated delta nets. Layers of `mtp` predict further tokens.
            FamilyRow(
                model_type="qwen3_next",
                architecture="Qwen3NextForCausalLM",
                names=_HEAD_NORMS,
                mixture=_QWEN_SHARED,
                unit_offset=True,
                delta=DeltaNames(
                    inputs=("linear_attn.in_proj_qkvz",),
                    scores=("linear_attn.in_proj_ba",),
                    by_head=True,
                ),
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        **_DELTA,
                        "num_key_value_heads": 2,
                        "num_experts": 512,
                        "num_experts_per_tok": 10,
                        "norm_topk_prob": True,
                    },
                    ignored_keys=frozenset({"use_sliding_window"}),
                    partial_rope=True,
                    output_gate=True,
                ),
            ),
            FamilyRow(
                model_type="qwen3_5_text",
                architecture="Qwen3_5ForCausalLM",
                text_of="qwen3_5",
                names=_HEAD_NORMS,
                unit_offset=True,
                delta=_QWEN35_DELTA,
                traced=True,
                decoder=_QWEN35_DECODER,
            ),
            FamilyRow(
                model_type="qwen3_5_moe_text",
                architecture="Qwen3_5MoeForCausalLM",
                text_of="qwen3_5_moe",
                names=_HEAD_NORMS,
                mixture=_QWEN_SHARED,
                unit_offset=True,
                delta=_QWEN35_DELTA,
                traced=True,
                decoder=replace(
                    _QWEN35_DECODER,
                    defaults={
                        **_DELTA,
                        "num_key_value_heads": 2,
                        "num_experts": 256,
                        "num_experts_per_tok": 8,
                    },
                    normalized_experts=True,
                    sparse_layers=SparseLayers.ALL_LAYERS,
                ),
            ),
            FamilyRow(
                model_type="gemma",
                architecture="GemmaForCausalLM",
                unit_offset=True,
                traced=True,
                decoder=_GEMMA_DECODER,
            ),
            FamilyRow(
                model_type="gemma2",
                architecture="Gemma2ForCausalLM",
                names=_SANDWICH,
                unit_offset=True,
                traced=True,
                decoder=_GEMMA2_DECODER,
            ),
            FamilyRow(
                model_type="gemma3_text",
                architecture="Gemma3ForCausalLM",
                names=replace(_SANDWICH, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
                unit_offset=True,
                traced=True,
                decoder=replace(
                    _GEMMA2_DECODER,
                    defaults={
                        **_GEMMA2_DEFAULTS,
                        "attn_logit_softcapping": None,
                        "final_logit_softcapping": None,
                        "sliding_window_pattern": 6,
                        "rope_theta": 1000000.0,
                        "rope_local_base_freq": 10000.0,
                    },
                    supported_values={
                        "use_bidirectional_attention": False,
                        "attn_logit_softcapping": None,
                    },
                    rope_by_layer_type=True,
                ),
            ),
            FamilyRow(
                model_type="phi3",
                architecture="Phi3ForCausalLM",
                names=PartNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
                traced=True,
                decoder=DecoderDesign(
                    defaults={**_RMS_NORM, "rms_norm_eps": 1e-5},
                    windows=Windows.ALL_LAYERS,
                    partial_rope=True,
                    qkv_bias=False,
                    output_bias=False,
                ),
            ),
            FamilyRow(
                model_type="granite",
                architecture="GraniteForCausalLM",
                traced=True,
                decoder=DecoderDesign(
                    defaults={**_RMS_NORM, **_GRANITE_MULTIPLIERS},
                    multipliers=True,
                    mlp_bias=_MLP_BIAS,
                ),
            ),
            FamilyRow(
                model_type="smollm3",
                architecture="SmolLM3ForCausalLM",
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        **_RMS_NORM,
                        "num_key_value_heads": 4,
                        "rope_theta": 2000000.0,
                        "no_rope_layer_interval": 4,
                    },
                    ignored_keys=frozenset({"max_window_layers"}),
                    windows=Windows.LAYERS_WITHOUT_ROPE,
                    no_rope_layers=True,
                    mlp_bias=_MLP_BIAS,
                    tied=True,
                ),
            ),
            FamilyRow(
                model_type="phi",
                architecture="PhiForCausalLM",
                names=PartNames(
                    output="self_attn.dense",
                    up=("mlp.fc1",),
                    down="mlp.fc2",
                    mlp_norm="input_layernorm",
                    norm="model.final_layernorm",
                ),
                gated=False,
                centered=True,
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        **_LAYER_NORM,
                        "hidden_act": "gelu_new",
                        "partial_rotary_factor": 0.5,
                    },
                    supported_values={"qk_layernorm": False},
                    eps_key="layer_norm_eps",
                    partial_rope=True,
                    parallel_residual=True,
                    qkv_bias=True,
                    output_bias=True,
                    mlp_bias=True,
                    head_bias=True,
                ),
            ),
            FamilyRow(
                model_type="starcoder2",
                architecture="Starcoder2ForCausalLM",
                names=PartNames(up=("mlp.c_fc",), down="mlp.c_proj"),
                gated=False,
                centered=True,
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        "hidden_act": "gelu_pytorch_tanh",
                        "norm_epsilon": 1e-5,
                        "rope_theta": 10000.0,
                        "num_key_value_heads": 2,
                    },
                    ignored_keys=frozenset({"activation_function"}),
                    supported_values={"mlp_type": "default", "norm_type": "layer_norm"},
                    eps_key="norm_epsilon",
                    windows=Windows.ALL_LAYERS,
                    qkv_bias=("use_bias", True),
                    output_bias=("use_bias", True),
                    mlp_bias=("use_bias", True),
                    tied=True,
                ),
            ),
            # Its weights are stored as [in, out]; the linears are [out, in] as all others.
            FamilyRow(
                model_type="gpt2",
                architecture="GPT2LMHeadModel",
                names=_GPT2_NAMES,
                gated=False,
                centered=True,
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        "activation_function": "gelu_new",
                        "layer_norm_epsilon": 1e-5,
                        "max_position_embeddings": 1024,
                    },
                    aliases=_GPT_ALIASES,
                    supported_values={
                        "add_cross_attention": False,
                        "scale_attn_by_inverse_layer_idx": False,
                        "scale_attn_weights": True,
                    },
                    # how scores are computed, not which
                    ignored_keys=_GPT_IGNORED | {"reorder_and_upcast_attn"},
                    activation_key="activation_function",
                    mlp_size_key="n_inner",
                    mlp_size_optional=True,
                    eps_key="layer_norm_epsilon",
                    rotates=False,
                    qkv_bias=True,
                    output_bias=True,
                    mlp_bias=True,
                    tied=True,
                ),
            ),
            # StarCoder and SantaCoder
            FamilyRow(
                model_type="gpt_bigcode",
                architecture="GPTBigCodeForCausalLM",
                names=_GPT2_NAMES,
                gated=False,
                centered=True,
                fused=BY_HEAD,
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        "activation_function": "gelu_pytorch_tanh",
                        "layer_norm_epsilon": 1e-5,
                        "max_position_embeddings": 1024,
                        "multi_query": True,
                    },
                    aliases=_GPT_ALIASES,
                    supported_values={"add_cross_attention": False, "scale_attn_weights": True},
                    # how scores are computed, not which; multi_query says how many kv heads
                    ignored_keys=_GPT_IGNORED
                    | {
                        "attention_softmax_in_fp32",
                        "inference_runner",
                        "max_batch_size",
                        "max_sequence_length",
                        "num_key_value_heads",
                        "pad_key_length",
                        "pre_allocate_kv_cache",
                        "scale_attention_softmax_in_fp32",
                        "validate_runner_input",
                    },
                    activation_key="activation_function",
                    mlp_size_key="n_inner",
                    mlp_size_optional=True,
                    eps_key="layer_norm_epsilon",
                    kv_heads=KvHeads.BY_GENERATION,
                    rotates=False,
                    qkv_bias=True,
                    output_bias=True,
                    mlp_bias=True,
                    tied=True,
                ),
            ),
            FamilyRow(
                model_type="opt",
                architecture="OPTForCausalLM",
                names=PartNames(
                    output="self_attn.out_proj",
                    up=("fc1",),
                    down="fc2",
                    attention_norm="self_attn_layer_norm",
                    mlp_norm="final_layer_norm",
                    layers="model.decoder.layers",
                    embedding="model.decoder.embed_tokens",
                    positions="model.decoder.embed_positions",
                    embedding_linear="model.decoder.project_in",
                    head_linear="model.decoder.project_out",
                    norm="model.decoder.final_layer_norm",
                ),
                gated=False,
                centered=True,
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        "activation_function": "relu",
                        "do_layer_norm_before": True,
                        "_remove_final_layer_norm": False,
                        "max_position_embeddings": 2048,
                    },
                    supported_values={"layer_norm_elementwise_affine": True},
                    # of training
                    ignored_keys=frozenset(
                        {"activation_dropout", "dropout", "init_std", "layerdrop", "prefix"}
                    ),
                    activation_key="activation_function",
                    mlp_size_key="ffn_dim",
                    eps=1e-5,
                    position_offset=2,
                    rotates=False,
                    norm_before_key="do_layer_norm_before",
                    no_last_norm_key="_remove_final_layer_norm",
                    embedding_size_key="word_embed_proj_dim",
                    qkv_bias=("enable_bias", True),
                    output_bias=("enable_bias", True),
                    mlp_bias=("enable_bias", True),
                    tied=True,
                ),
            ),
            FamilyRow(
                model_type="bloom",
                architecture="BloomForCausalLM",
                names=PartNames(
                    qkv=("self_attention.query_key_value",),
                    output="self_attention.dense",
                    up=("mlp.dense_h_to_4h",),
                    down="mlp.dense_4h_to_h",
                    layers="transformer.h",
                    embedding="transformer.word_embeddings",
                    embedding_norm="transformer.word_embeddings_layernorm",
                    norm="transformer.ln_f",
                ),
                gated=False,
                centered=True,
                fused=BY_HEAD,
                traced=True,
                decoder=DecoderDesign(
                    defaults={"layer_norm_epsilon": 1e-5},
                    kv_heads=KvHeads.EACH,
                    activation="gelu_pytorch_tanh",
                    aliases={
                        "n_layer": "num_hidden_layers",
                        "n_head": "num_attention_heads",
                        "n_embed": "hidden_size",
                    },
                    supported_values={
                        "apply_residual_connection_post_layernorm": False,
                        "slow_but_exact": False,
                    },
                    # of the program that trained it
                    ignored_keys=frozenset(
                        {
                            "attention_softmax_in_fp32",
                            "bias_dropout_fusion",
                            "masked_softmax_fusion",
                            "n_inner",
                            "offset_alibi",
                            "seq_length",
                            "skip_bias_add",
                            "skip_bias_add_qkv",
                        }
                    ),
                    eps_key="layer_norm_epsilon",
                    mlp_size_key=None,
                    alibi=True,
                    qkv_bias=True,
                    output_bias=True,
                    mlp_bias=True,
                    tied=True,
                ),
            ),
            FamilyRow(
                model_type="falcon",
                architecture="FalconForCausalLM",
                names=PartNames(
                    qkv=("self_attention.query_key_value",),
                    output="self_attention.dense",
                    up=("mlp.dense_h_to_4h",),
                    down="mlp.dense_4h_to_h",
                    layers="transformer.h",
                    embedding="transformer.word_embeddings",
                    norm="transformer.ln_f",
                ),
                gated=False,
                centered=True,
                fused=BY_HEAD,
                traced=True,
                decoder=DecoderDesign(
                    defaults={
                        "activation": "gelu",
                        "layer_norm_epsilon": 1e-5,
                        "rope_theta": 10000.0,
                        "multi_query": True,
                        "parallel_attn": True,
                    },
                    aliases={"n_embed": "hidden_size"},
                    supported_values={"apply_residual_connection_post_layernorm": False},
                    # what code beside the weights read in their places
                    ignored_keys=frozenset({"n_head", "n_head_kv", "n_layer"}),
                    activation_key="activation",
                    eps_key="layer_norm_epsilon",
                    mlp_size_key="ffn_hidden_size",
                    mlp_size_optional=True,
                    kv_heads=KvHeads.BY_GENERATION,
                    alibi="alibi",
                    rounded_alibi=True,
                    twin_norms=("ln_attn", "ln_mlp"),
                    qkv_bias=("bias", False),
                    output_bias=("bias", False),
                    mlp_bias=("bias", False),
                    tied=True,
                ),
            ),
            FamilyRow(
                model_type="gptj",
                architecture="GPTJForCausalLM",
                names=replace(_GPTJ_NAMES, qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj")),
                gated=False,
                centered=True,
                traced=True,
                decoder=_GPTJ_DECODER,
            ),
            # Four processors trained it, and the heads of each lie together.
            FamilyRow(
                model_type="codegen",
                architecture="CodeGenForCausalLM",
                names=replace(_GPTJ_NAMES, qkv=("attn.qkv_proj",)),
                gated=False,
                centered=True,
                fused=FusedRows(blocks=4, order="qvk"),
                traced=True,
                decoder=_GPTJ_DECODER,
            ),
        )
    }
)
