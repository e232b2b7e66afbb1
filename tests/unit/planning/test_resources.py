"""Allowances of stages: sizes by hand, what is shrunk first, and the numbers of each refusal."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quantflow import cpu_threads, process_memory
from quantflow.errors import InputError, ResourceError, UsageError
from quantflow.files.safetensors_header import TensorInfo
from quantflow.models.graph import UNTRACED, Graph, Layer, LinearGroup
from quantflow.numerics import output_blocks
from quantflow.planning.cost import (
    LIBRARIES,
    MemoryNeed,
    need_layers,
    need_measure,
    refitting_moments,
)
from quantflow.planning.durations import GptqSpeed, Speed
from quantflow.planning.plan import resolve
from quantflow.planning.recipe import Override, Quantize, Resources, SignRound
from quantflow.planning.resources import compare, grant, memory_limit, round_up, written_bytes
from quantflow.planning.sizes import layer_bytes, model_size

MB = 10**6
HIDDEN, WIDE, VOCABULARY = 256, 512, 1000
SHAPES = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (128, 256),
    "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256),
}
SHAPES |= {"mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512)}


class Config:
    """The config.json of a small Llama with two layers."""

    model_type = "llama"
    hidden_size, num_attention_heads, num_key_value_heads, vocab_size = HIDDEN, 4, 2, VOCABULARY


def graph() -> Graph:
    layers = []
    for index in range(2):
        prefix = f"model.layers.{index}"
        named = [
            LinearGroup(linears=tuple(f"{prefix}.{name}" for name in names), norm="n")
            for names in GROUPS
        ]
        layers.append(
            Layer(index=index, prefix=prefix, attention=f"{prefix}.self_attn", groups=tuple(named))
        )
    return Graph(family=UNTRACED["llama"], layers=tuple(layers))


GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
GRAPH = graph()


def infos() -> dict[str, TensorInfo]:
    shapes = {
        f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in SHAPES.items()
    }
    shapes |= {f"model.layers.{i}.norm.weight": (HIDDEN,) for i in range(2)}
    shapes |= {"embed.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    found = {}
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        found[name] = TensorInfo(name=name, dtype="BF16", shape=shape, offset=0, nbytes=2 * count)
    return found


def plan(scheme: str, **options):
    shapes = {name: info.shape for name, info in infos().items()}
    return resolve(Quantize(name="a", scheme=scheme, **options), GRAPH, shapes)


MODEL = model_size(infos(), Config(), GRAPH)
LAYER = 256 * 256 * 2 + 2 * 128 * 256 + 3 * 512 * 256 + 256  # weights of one layer, its norm too


def test_the_sizes_of_a_model_are_those_of_its_headers():
    assert [layer.elements for layer in MODEL.layers] == [LAYER, LAYER]
    assert MODEL.layer.stored == 2 * LAYER and MODEL.outside == 2 * 2 * VOCABULARY * HIDDEN
    assert MODEL.stored == sum(info.nbytes for info in infos().values())
    assert MODEL.layer.groups[0] == (
        tuple(f"model.layers.0.{name}" for name in GROUPS[0]),
        (256, 128, 128),
        256,
    )
    assert (MODEL.heads, MODEL.kv_heads, MODEL.head_dim) == (4, 2, 64)


def test_a_checkpoint_without_a_linear_of_its_family_is_refused_by_name():
    broken = infos()
    del broken["model.layers.1.self_attn.o_proj.weight"]
    with pytest.raises(
        InputError, match=r"model\.layers\.1\.self_attn.o_proj\.weight: no such tensor"
    ):
        model_size(broken, Config(), GRAPH)


def test_the_bytes_of_a_quantized_layer_are_counted_by_hand():
    weights = LAYER - 256
    rows = 256 + 128 + 128 + 256 + 512 + 512 + 256
    assert layer_bytes(MODEL, plan("FP8_DYNAMIC").schemes) == [weights + 4 * rows + 2 * 256] * 2
    grouped = layer_bytes(MODEL, plan("W4A16", algorithm="rtn").schemes)
    # packed weights, bf16 scales, the seven tensors of shapes, and the norm
    assert grouped == [weights // 2 + 2 * weights // 128 + 7 * 16 + 2 * 256] * 2


def test_measure_holds_one_float32_layer_and_keeps_two_generations_of_hidden_states_on_disk():
    need = need_measure(MODEL, lengths=[10, 30], stats=("channel_amax",))
    hidden = 4 * HIDDEN * 40
    features = 3 * 256 + 256 + 2 * 256 + 512  # of each linear's input
    statistics = 2 * (4 * features + 7 * 2 * 4)  # and amax of each weight and output
    # so the disk holds the most while layers run: two generations of hidden states
    assert hidden > statistics
    assert (need.scratch, need.result) == (2 * hidden, 8 * 40 + statistics)
    every = need_measure(MODEL, lengths=[1], stats=("channel_amax", "hessian"))
    # 8 bytes of the result are the token's id; at the end the statistics are on disk twice
    written = every.result - 8
    assert every.scratch == 4 * HIDDEN + written
    layer = 4 * LAYER + 2 * 512 * 256
    assert need.peak(base=0, workers=1) >= LIBRARIES + layer
    assert need.peak(base=7, workers=1) == need.peak(base=0, workers=1) + 7


def test_gradients_need_the_input_of_every_layer_on_disk_and_a_sequence_on_its_way_back():
    plain, need = (
        need_measure(MODEL, lengths=[10, 30], stats=stats)
        for stats in (("amax",), ("amax", "fisher"))
    )
    hidden = 4 * HIDDEN * 40
    # the channels of all inputs; the outputs of all linears are as many channels of gradients
    features = 3 * 256 + 256 + 2 * 256 + 512
    outputs = 256 + 128 + 128 + 256 + 512 + 512 + 256
    # 8 bytes a channel, and a count at the two sites of each linear
    assert need.result - plain.result == 2 * 8 * (features + outputs + 7 * 2)
    statistics = need.result - 8 * 40
    # hidden states: both layers' inputs and the last output; and two generations of gradients
    assert need.scratch == (2 + 1) * hidden + 2 * hidden + statistics
    # a lower bound: the input and output of a layer, and the tensors between an MLP's linears
    sequence = 4 * 30 * (2 * HIDDEN + 3 * 512)
    assert need.peaks[-1][1] > plain.peaks[1][1] and need.peaks[-1][1] >= sequence
    with pytest.raises(UsageError, match="statistic 'kurtosis' is unknown"):
        # an unknown statistic is refused, not counted as zero bytes
        need_measure(MODEL, lengths=[10], stats=("kurtosis",))
    fixed, each = need.peaks[-2]  # the head as stored; of each worker logits and their gradient
    assert fixed >= LIBRARIES + 2 * VOCABULARY * HIDDEN and each >= 2 * 4 * 30 * VOCABULARY


def test_sums_of_gradients_are_in_the_measurement_and_those_of_one_group_in_memory_at_a_time():
    plain, need = (
        need_measure(MODEL, lengths=[10], stats=stats)
        for stats in (("amax",), ("amax", "gradient"))
    )
    # outputs x outputs of seven linears, in two layers
    sums = 2 * 4 * (3 * 256**2 + 2 * 128**2 + 2 * 512**2)
    assert need.result - plain.result == sums + 2 * 7 * 8  # and a count of tokens for each
    # the backward pass has steps and files of its own
    assert need.scratch - plain.scratch > sums and len(need.peaks) > len(plain.peaks)
    # the sums of all linears are never in memory together
    assert max(fixed for fixed, _ in need.peaks) - max(fixed for fixed, _ in plain.peaks) < sums
    gptq, yaqa = (
        need_layers(MODEL, plan("W4A16", algorithm=name), lengths=[10]) for name in ("gptq", "yaqa")
    )
    rounding = [index for index, moment in enumerate(gptq.peaks) if moment != yaqa.peaks[index]]
    # the rounding of the four groups; the step before each makes its Hessian whole
    assert yaqa.base == gptq.base and rounding == [3, 5, 7, 9]
    for index, outputs in zip(rounding, ((256, 128, 128), (256,), (512, 512), (256,)), strict=True):
        beside = gptq_to_yaqa(outputs, 512 if index == 9 else 256)
        assert yaqa.peaks[index][0] - gptq.peaks[index][0] == beside


def test_sums_of_gradients_that_are_rotated_have_their_memory_told():
    words = {"transforms": ({"hadamard": {}},)}
    gptq, yaqa = (
        need_layers(MODEL, plan("W4A16", algorithm=name, **words), lengths=[10])
        for name in ("gptq", "yaqa")
    )
    more = [ours[0] - theirs[0] for ours, theirs in zip(yaqa.peaks, gptq.peaks, strict=True)]
    expected = [
        gptq_to_yaqa(outputs, features) + output_blocks.rotation_bytes(max(outputs))
        for outputs, features in zip(
            ((256, 128, 128), (256,), (512, 512), (256,)), (256, 256, 256, 512), strict=True
        )
    ]
    assert [bytes_ for bytes_ in more if bytes_] == expected


def gptq_to_yaqa(outputs: tuple[int, ...], features: int) -> int:
    """Bytes of a group's sums, and of yaqa's factor beside the Hessian, which gptq overwrites."""
    return 4 * sum(width * width for width in outputs) + 4 * features**2


def test_the_way_back_takes_three_more_passes_through_every_layer():
    none = dict.fromkeys(("read", "written", "hashed", "hessian"), 0.0)
    rates = {"observed": {"fisher": 0.0}, "gradient": 0.5, "rounded": {}, "gptq": {}}
    speed = Speed(cores=2, units=2, ahead=False, token=3.0, run=3.0, **rates, **none)
    assert speed.measure(MODEL, [10, 30], ["fisher"]) == 4 * 3.0 * 40 * 2 / 2
    # products of the outputs of seven linears, in two layers
    products = 2 * (3 * 256**2 + 2 * 128**2 + 2 * 512**2)
    assert (
        speed.measure(MODEL, [10, 30], ["gradient"]) == (4 * 3.0 * 40 * 2 + 0.5 * 40 * products) / 2
    )


def test_measuring_nothing_runs_no_layer():
    need = need_measure(MODEL, lengths=[100], stats=())
    assert need.peak(base=0, workers=2) < 10_000 and need.result == 800 and need.scratch == 0


def test_measuring_a_mixture_runs_layers_only_where_tokens_are_counted():
    mixture = replace(MODEL, layers=tuple(replace(layer, sparse=True) for layer in MODEL.layers))
    counted, plain = (
        need_measure(mixture, lengths=[100], stats=(), counts=counts) for counts in (True, False)
    )
    assert counted.peak(base=0, workers=1) > LIBRARIES
    assert plain == need_measure(MODEL, lengths=[100], stats=())


def test_gptq_needs_half_of_every_hessian_and_the_whole_of_the_group_that_it_rounds():
    rtn = need_layers(MODEL, plan("W4A16", algorithm="rtn"), lengths=[])
    gptq = need_layers(MODEL, plan("W4A16"), lengths=[10])
    # half a Hessian is kept in strips of 256 rows, which end at the diagonal
    small, large = 4 * 256**2, 4 * (256 * 256 + 256 * 512)
    # the inputs of one sequence of ten tokens, and its products while the Hessian adds them
    inputs, product = 4 * 10 * (3 * 256 + 512), 4 * 2 * 256 * 512
    # the inputs transposed, filled up to 64 rows: all columns, and a strip twice
    product += 4 * 64 * (512 + 2 * 256)
    assert gptq.peaks[1][0] - rtn.peaks[1][0] == 3 * small + large + inputs + product
    making, rounding = 2, 3  # the first group's, behind the embedding and the forward
    assert gptq.peaks[making][0] - rtn.peaks[making][0] == 4 * 256**2 + 3 * small + large
    assert gptq.peaks[rounding][0] - rtn.peaks[rounding][0] == 4 * 256**2 + 2 * small + large
    assert (rtn.scratch, gptq.scratch) == (0, 2 * 4 * HIDDEN * 10)


def test_learned_rounding_needs_the_text_twice_all_weights_and_a_way_back_per_worker():
    nearest, learned = (
        need_layers(MODEL, plan("W4A16", algorithm=name), lengths=[10])
        for name in ("rtn", "signround")
    )
    hidden = 4 * HIDDEN * 10
    assert learned.scratch == 2 * 2 * hidden
    assert learned.result == nearest.result
    assert len(learned.peaks) == len(nearest.peaks) + 2
    linears = LAYER - 256
    stored = 2 * linears + 4 * 256  # the norm is in float32
    started = linears + 5 * linears // 128  # qvalues, scales, and zero points if there were any
    fixed, each = max(learned.peaks)
    assert fixed == LIBRARIES + stored + started + 18 * linears + 8 * 4 * linears // 128
    # a lower bound: the input and output of the layer, and the tensors between an MLP's linears
    activations = 4 * 10 * (2 * HIDDEN + 3 * 512)
    # rows that take a step: in so small a layer they are more than a gradient of all weights
    units = 3 * 6 * 4 * (1 << 18)
    assert units + activations < each < units + 10 * activations


def test_refitting_needs_the_text_twice_and_keeps_the_layer_and_its_groups_as_they_run():
    plain, fitted = (
        need_layers(MODEL, plan("W4A16", algorithm="gptq", refit=fits), lengths=[10])
        for fits in (False, True)
    )
    assert fitted.scratch == 2 * plain.scratch == 2 * 2 * 4 * HIDDEN * 10
    assert fitted.result == plain.result
    count = len(MODEL.layer.groups)
    assert len(fitted.peaks) == len(plain.peaks) + 2 * count
    names, outputs, features = MODEL.layer.groups[-1]
    assert len(names) == len(outputs) == 1  # it adds to the hidden state
    stored = 2 * (LAYER - 256) + 4 * 256  # the norm is in float32
    before = LAYER - 256 - outputs[0] * features  # weights of the groups before
    moments = refitting_moments(MODEL, plan("W4A16", algorithm="gptq", refit=True), 10)
    assert moments == [
        (fixed - LIBRARIES, each) for fixed, each in fitted.peaks[-2 * count - 3 : -3]
    ]
    summing, solving = moments[-2:]
    sums = 4 * features * (features + HIDDEN)
    held = stored + 4 * before + sums + 4 * features**2
    # beside these the encoded groups before: half a byte and a sixty-fourth of a weight
    assert held < solving[0] - 4 * features * (features + outputs[0]) < held + before
    assert solving[1] == 3 * 4 * 256 * features
    assert summing[1] > 2 * 4 * 10 * (features + HIDDEN)


def test_learning_runs_each_sequence_there_and_back_in_every_iteration():
    none = dict.fromkeys(("read", "written", "hashed", "hessian", "gradient"), 0.0)
    speed = Speed(
        cores=2,
        units=2,
        ahead=False,
        token=3.0,
        run=3.0,
        observed={},
        rounded={"a": 0.0},
        gptq={},
        **none,
    )
    given = plan("W4A16", algorithm="signround", signround=SignRound(iterations=100, sequences=4))
    # For each of two layers: both sequences through the original and the quantized layer, 100 times
    # 2 sequences of 20 tokens forward and back (3 forwards' work), and the error of both at the
    # start and ten times.
    assert (
        speed.quantize(MODEL, given, [10, 30]) == (2 * 2 + 100 * 2 * 3 + 11 * 2) * 20 * 3.0 * 2 / 2
    )


@pytest.mark.parametrize(("algorithm", "rounders"), [("gptq", 1), ("yaqa", 2)])
def test_on_a_device_one_sequence_runs_at_once_and_all_cores_round_what_is_rounded_in_host_memory(
    algorithm, rounders
):
    none = dict.fromkeys(("read", "written", "hashed", "hessian", "gradient"), 0.0)
    rounding = {"rounded": {"a": 0.0}, "gptq": {"a": GptqSpeed(cubic=0.0, linear=0.5, square=0.0)}}
    speed = Speed(
        cores=2,
        units=1,
        ahead=True,
        token=3.0,
        run=1.0,
        observed={"fisher": 0.0},
        **rounding,
        **none,
    )
    tokens, layers, linears = 40, 2, LAYER - 256
    assert speed.measure(MODEL, [10, 30], ["fisher"]) == 4 * 1.0 * tokens * layers
    twice = 2 * 3.0 * tokens * layers  # as it was and as it is quantized, in float32
    assert (
        speed.quantize(MODEL, plan("W4A16", algorithm=algorithm), [10, 30])
        == twice + 0.5 * layers * linears / rounders
    )
    head = VOCABULARY * HIDDEN / LAYER
    assert speed.validate(MODEL, [10, 30]) == pytest.approx(3 * 1.0 * (layers + head) * tokens)


@pytest.mark.parametrize(("read", "seconds"), [(0.5, 2.0), (3.0, 3.0)])
def test_a_device_computes_while_the_next_layer_is_read_and_the_longer_of_both_counts(
    read, seconds
):
    none = dict.fromkeys(("written", "hashed", "hessian", "gradient", "token"), 0.0)
    rates = {"observed": {"amax": 0.0}, "rounded": {}, "gptq": {}, "read": read / MODEL.stored}
    device, cpu = (
        Speed(cores=1, units=1, ahead=ahead, run=0.5, **rates, **none) for ahead in (True, False)
    )
    assert device.measure(MODEL, [2], ["amax"]) == pytest.approx(seconds)
    assert cpu.measure(MODEL, [2], ["amax"]) == pytest.approx(read + 2.0)


def test_weights_are_counted_as_stored_or_in_float32_where_a_transform_changes_them():
    stored, smoothed = (
        need_layers(MODEL, given, lengths=[])
        for given in (plan("W8A8", transforms=()), plan("W8A8"))
    )
    linears, norm, largest = LAYER - 256, 256, 2 * 512 * 256
    assert smoothed.peaks[1][0] - stored.peaks[1][0] == 4 * LAYER + largest - (
        2 * linears + 4 * norm
    )


def test_two_schemes_of_one_input_take_a_factor_beside_the_hessian():
    plans = (
        plan("W4A16"),
        plan("W4A16", overrides=(Override(match="re:.*mlp.gate_proj", scheme="W8A16"),)),
    )
    one, two = (need_layers(MODEL, chosen, lengths=[10]).peaks for chosen in plans)
    rounding = 7  # the third group's
    more = layer_bytes(MODEL, plans[1].schemes)[0] - layer_bytes(MODEL, plans[0].schemes)[0]
    assert two[rounding][0] - one[rounding][0] == 4 * 256**2 + more


NEED = MemoryNeed(stage="measure", peaks=((100 * MB, 50 * MB),), result=1 * MB)


@pytest.fixture
def machine(monkeypatch):
    """A machine of two cores, 1 GB of memory and 900 MB free."""
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(process_memory, "total_bytes", lambda: 1000 * MB)
    monkeypatch.setattr(process_memory, "available_bytes", lambda: 900 * MB)


@pytest.mark.usefixtures("machine")
class TestGrant:
    def test_everything_that_fits_is_given(self, tmp_path):
        found = grant(NEED, Resources(), folder=tmp_path, base=10 * MB)
        assert found.workers == 2
        assert found.peak_bytes == (10 + 100 + 2 * 50) * MB and found.disk_bytes == 1 * MB

    def test_a_worker_goes_where_memory_is_short(self, tmp_path):
        found = grant(NEED, Resources(max_memory="210MB"), folder=tmp_path, base=10 * MB)
        assert (found.workers, found.peak_bytes) == (2, 210 * MB)
        found = grant(NEED, Resources(max_memory="209MB"), folder=tmp_path, base=10 * MB)
        assert (found.workers, found.peak_bytes) == (1, 160 * MB)

    def test_the_refusal_names_what_is_needed_the_limit_and_the_flag_that_would_do(self, tmp_path):
        with pytest.raises(ResourceError) as caught:
            grant(NEED, Resources(max_memory="150MB"), folder=tmp_path, base=10 * MB + 1)
        assert (
            "needs 160000001 bytes" in caught.value.cause
            and "--max-memory 150MB is 150000000" in caught.value.cause
        )
        assert (
            caught.value.remedy == "give --max-memory 161MB or more" and caught.value.exit_code == 5
        )
        grant(NEED, Resources(max_memory="161MB"), folder=tmp_path, base=10 * MB + 1)

    def test_disk_offload_leaves_a_tenth_of_the_memory(self, tmp_path):
        with pytest.raises(ResourceError, match="is 100000000") as caught:
            grant(NEED, Resources(disk_offload=True), folder=tmp_path, base=0)
        assert "instead of --disk-offload" in caught.value.remedy
        small = MemoryNeed(stage="measure", peaks=((60 * MB, 40 * MB),))
        found = grant(small, Resources(disk_offload=True), folder=tmp_path, base=0)
        assert (found.workers, found.peak_bytes) == (1, 100 * MB)

    def test_a_limit_beyond_what_is_free_is_what_is_free(self):
        assert memory_limit(Resources(max_memory="5GB"), resident=7)[0] == 900 * MB + 7
        assert memory_limit(Resources(max_memory="5MB", disk_offload=True), resident=7)[0] == 5 * MB

    def test_a_machine_that_is_too_small_is_told_so(self, tmp_path):
        huge = MemoryNeed(stage="validate", peaks=((5000 * MB, 0),))
        with pytest.raises(ResourceError, match="what is free on this machine") as caught:
            grant(huge, Resources(), folder=tmp_path, base=0)
        assert "5.00 GB of free memory" in caught.value.remedy

    def test_files_beyond_max_disk_are_refused_with_the_flag_that_would_do(self, tmp_path):
        need = MemoryNeed(stage="quantize", peaks=((1, 0),), result=2 * MB, scratch=1 * MB)
        with pytest.raises(ResourceError, match="writes 3000000 bytes") as caught:
            grant(need, Resources(max_disk="2MB"), folder=tmp_path, base=0)
        assert "--max-disk 3MB" in caught.value.remedy
        grant(need, Resources(max_disk="3MB"), folder=tmp_path, base=0)

    def test_what_an_earlier_attempt_wrote_need_not_be_free_again(self, tmp_path, monkeypatch):
        folder = tmp_path / "out"
        (folder / "layers").mkdir(parents=True)
        (folder / "layers" / "0").write_bytes(bytes(600))
        (tmp_path / ".out.work").mkdir()
        (tmp_path / ".out.work" / "state").write_bytes(bytes(300))
        monkeypatch.setattr("quantflow.planning.resources.free_bytes", lambda _: 100)
        need = MemoryNeed(stage="quantize", peaks=((1, 0),), result=1000)
        grant(need, Resources(), folder=folder, base=0)
        with pytest.raises(ResourceError, match="writes 101 bytes") as caught:
            grant(
                MemoryNeed(stage="quantize", peaks=((1, 0),), result=1001),
                Resources(),
                folder=folder,
                base=0,
            )
        assert caught.value.remedy.startswith("free 1MB on that disk")


def test_a_size_in_a_remedy_is_never_less_than_what_is_needed():
    assert [round_up(n) for n in (1, MB, MB + 1, 999 * MB, 10**9, 10**9 + 1)] == [
        "1MB",
        "1MB",
        "2MB",
        "999MB",
        "1.0GB",
        "1.1GB",
    ]


def test_limits_that_are_no_sizes_are_refused():
    for bad in ("lots", "-1GB", "0"):
        with pytest.raises(UsageError, match="size"):
            Resources(max_memory=bad)


def test_the_plan_is_compared_with_what_was_used():
    assert compare("measure", planned=3_100_000_000, used=2_900_000_000) == (
        "measure memory: planned 3.10 GB, used 2.90 GB, -6 %"
    )


def test_files_are_counted_below_a_folder_and_a_missing_folder_has_none(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").write_bytes(bytes(3))
    (tmp_path / "a" / "b" / "y").write_bytes(bytes(4))
    assert (written_bytes(tmp_path), written_bytes(tmp_path / "none")) == (7, 0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_the_peak_of_a_process_is_seen_and_begins_anew():
    script = """
from quantflow import process_memory
block = bytearray(200_000_000)
del block
before = process_memory.usage()
again = process_memory.reset_peak()
after = process_memory.usage()
freed = 190_000_000
print(before.peak - before.resident > freed, not again or after.peak < before.peak - freed)
print(before.resident >= before.anonymous + before.file > 0)
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["True"] * 3


def test_the_machine_has_memory_and_cores():
    assert 0 < process_memory.available_bytes() <= process_memory.total_bytes()
    assert cpu_threads.usable_cores() >= 1
