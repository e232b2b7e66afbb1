"""benchmarks/gpu.py and its checks on the CPU.

A check that fails or hangs leaves the others, and results outlive a kill.
"""

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from quantflow.core.scheme import preset
from quantflow.files.stage_folder import locked

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
CPU = torch.device("cpu")
FAKES = """
import os, subprocess, sys, time

def tells(place, found):
    found.figure("speed", 2.5, "GB/s")
    found.claim("the same", promised="all", found="all", met=True)
    found.bar("as fast", promised="10 s", found="11 s", met=False)

def breaks(place, found):
    found.figure("before", 1)
    raise RuntimeError("it broke | here")

def misses(place, found):
    found.claim("the same", promised="all", found="none", met=False)

def hangs(place, found):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    found.figure("pids", f"{os.getpid()} {child.pid}")
    time.sleep(60)
"""


@pytest.fixture
def part(monkeypatch):
    """Return what imports a module as the script sees it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


@pytest.fixture
def gpu(part, tmp_path, monkeypatch):
    """The script, whose processes can import the made-up checks."""
    (tmp_path / "made_up_checks.py").write_text(FAKES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return part("gpu")


@pytest.fixture
def place(part, tmp_path):
    return part("_gpu.record").Place(
        device="cpu",
        size="smallest",
        model=ROOT / "examples/tiny-llama",
        work=tmp_path / "work",
        shared=tmp_path / "work/shared",
        peers=tmp_path / "peers",
    )


def checks(gpu, *names, limit=30.0):
    return [
        gpu.Check(name=name, asks=f"{name}?", function=f"made_up_checks:{name}", limit=limit)
        for name in names
    ]


def run(gpu, place, chosen, *, budget=100.0):
    """Return the outcomes, the states that were kept after each check, and what was said."""
    kept, said = [], []
    outcomes = gpu.run(
        chosen,
        place,
        budget=budget,
        keep=lambda found, seconds: kept.append([outcome.state for outcome in found]),
        say=said.append,
        earlier={},
    )
    return outcomes, kept, said


def alive(pid: int) -> bool:
    """Return whether a process runs; one that nobody waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_check_that_fails_leaves_what_it_found_and_the_others(gpu, place):
    outcomes, kept, said = run(gpu, place, checks(gpu, "breaks", "misses", "tells"))
    assert [outcome.state for outcome in outcomes] == ["failed", "done", "done"]
    assert outcomes[0].reason == "exit 1: RuntimeError: it broke | here"
    assert outcomes[0].found["figure"] == [{"what": "before", "value": 1, "unit": ""}]
    assert outcomes[2].found["figure"] == [{"what": "speed", "value": 2.5, "unit": "GB/s"}]
    assert kept == [
        ["not run"] * 3,
        ["failed", "not run", "not run"],
        ["failed", "done", "not run"],
        ["failed", "done", "done"],
    ]
    missed = [line for outcome in outcomes for line in outcome.missed]
    assert missed == ["breaks: exit 1: RuntimeError: it broke | here", "misses: the same"]
    assert said[0] == "1 of 3, breaks: 0 s gone, at most 90 s to go"


def test_a_clone_that_is_not_installed_is_found_by_its_script(tmp_path):
    """A folder that is held: the script imports quantflow to say so, and nothing slow."""
    packages = Path(torch.__file__).parents[1]
    command = [sys.executable, "-S", BENCHMARKS / "gpu.py", "--device", "cpu", "--work", tmp_path]
    with locked(tmp_path):
        done = subprocess.run(
            command,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(packages)},  # without its .pth files
            capture_output=True,
            text=True,
        )
    assert (done.returncode, done.stdout) == (5, ""), done.stderr
    assert str(tmp_path) in done.stderr


def test_without_a_gpu_a_bar_is_not_judged(gpu, place):
    (outcome,), _, _ = run(gpu, place, checks(gpu, "tells"))
    assert outcome.found["bar"] == [] and outcome.missed == []
    assert outcome.found["absent"] == [{"what": "as fast: 10 s", "why": "judged on a GPU alone"}]


@pytest.mark.slow
def test_a_check_past_its_limit_is_ended_with_all_that_it_started(gpu, place):
    begin = time.monotonic()
    outcomes, _, _ = run(gpu, place, [*checks(gpu, "hangs", limit=6.0), *checks(gpu, "tells")])
    assert [outcome.state for outcome in outcomes] == ["ended", "done"]
    assert outcomes[0].reason == "it was not done after 6 s" and outcomes[0].missed
    pids = [int(pid) for pid in outcomes[0].found["figure"][0]["value"].split()]
    assert len(pids) == 2 and not any(map(alive, pids))
    assert time.monotonic() - begin < 30


def test_what_the_time_is_too_short_for_is_not_begun_and_says_so(gpu, place):
    chosen = [*checks(gpu, "hangs", limit=2.0), *checks(gpu, "tells", limit=300.0)]
    outcomes, _, said = run(gpu, place, chosen, budget=20.0)
    assert [outcome.state for outcome in outcomes] == ["ended", "not run"]
    assert outcomes[1].reason.endswith("of 20 were left, and it may take 300")
    assert outcomes[1].seconds is None and not (place.work / "tells").exists()
    assert said[-1] == f"tells: not run, {outcomes[1].reason}"


def test_a_kill_leaves_the_results_of_the_checks_before(gpu, place, tmp_path):
    """The script is killed in its second check; the file is whole, and has the first."""
    program = f"""
import dataclasses, json, sys
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu
from _gpu.record import Place, write_whole
paths = {{name: Path({str(place.work)!r}) for name in ("model", "work", "shared", "peers")}}
place = Place(device="cpu", size="smallest", **paths)
names = ("tells", "hangs", "misses")
chosen = [
    gpu.Check(name=name, asks="?", function="made_up_checks:" + name, limit=60) for name in names
]
def keep(outcomes, seconds):
    found = json.dumps([dataclasses.asdict(one) for one in outcomes])
    write_whole(Path({str(tmp_path)!r}) / "results.json", found)
gpu.run(chosen, place, budget=100, keep=keep, say=print, earlier={{}})
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    told = place.work / "hangs" / "found.jsonl"
    deadline = time.monotonic() + 60
    while not (told.exists() and told.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for pid in json.loads(told.read_text())["value"].split():  # nobody is left to end the check
        os.kill(int(pid), signal.SIGKILL)
    found = json.loads((tmp_path / "results.json").read_text())
    assert [(one["name"], one["state"]) for one in found] == [
        ("tells", "done"),
        ("hangs", "not run"),
        ("misses", "not run"),
    ]
    assert (
        found[0]["found"]["claim"][0]["met"] and found[2]["reason"] == "the script ended before it"
    )


def test_a_line_that_was_cut_off_is_left_out(part, tmp_path):
    record = part("_gpu.record")
    found = record.Found(tmp_path / "found.jsonl", on_gpu=True)
    found.bar("speed", promised="1 s", found="2 s", met=False)
    with (tmp_path / "found.jsonl").open("a") as file:
        file.write('{"kind": "figure", "wha')
    assert record.read_found(tmp_path / "found.jsonl") == {
        "figure": [],
        "claim": [],
        "bar": [{"what": "speed", "promised": "1 s", "found": "2 s", "met": False}],
        "absent": [],
    }
    assert record.read_found(tmp_path / "none") == {kind: [] for kind in record.KINDS}


def test_a_place_comes_back_from_its_file(part, place, tmp_path):
    place.write(tmp_path / "place.json")
    assert part("_gpu.record").read_place(tmp_path / "place.json") == place
    assert not place.on_gpu
    there = part("dataclasses").replace(place, device="cuda:1")
    assert there.on_gpu and there.kind == "cuda"


def test_the_page_in_docs_is_that_of_the_results_beside_it(part):
    results = json.loads((ROOT / "docs/gpu-results.json").read_text())
    assert (ROOT / "docs/gpu-results.md").read_text() == part("_gpu.page").page(results), (
        "run `make gpu`"
    )
    names = [check.name for check in part("gpu").CHECKS]
    assert [check["name"] for check in results["checks"]] == names, "run `make gpu`"


def test_a_page_says_what_ran_it_what_failed_and_what_does_not_hold(gpu, place, part):
    outcomes, _, _ = run(gpu, place, checks(gpu, "breaks", "misses"))
    results = {
        "checks": [vars(outcome) for outcome in outcomes],
        "seconds": 3.25,
        "budget": 60.0,
        "size": "smallest",
    }
    results |= {
        "device": "cpu",
        "name": "the CPU",
        "command": "python benchmarks/gpu.py",
        "date": "2026-01-02",
    }
    text = part("_gpu.page").page(results)
    assert text.startswith("No GPU has run what this page shows")
    assert (
        "| breaks | failed |" in text and "Failed: exit 1: RuntimeError: it broke \\| here" in text
    )
    assert "| the same | all | none | NO |" in text and "| misses | done |" in text
    assert "2026-01-02, size `smallest`, 3.25 of at most 60 s." in text
    on_gpu = part("_gpu.page").page(results | {"device": "cuda:0", "name": "NVIDIA H100"})
    assert on_gpu.startswith("NVIDIA H100 ran what this page shows.")


def test_results_of_some_checks_do_not_replace_those_of_all(gpu):
    assert gpu._arguments([]).json == ROOT / "docs/gpu-results.json"
    some = gpu._arguments(["--only", "products", "--work", "w"])
    assert (some.json, some.page) == (Path("w/gpu-results.json"), Path("w/gpu-results.md"))
    assert gpu._told(gpu._arguments(["--device", "cpu", "--only", "same bits", "graph"])) == [
        "--device cpu",
        "--only 'same bits' graph",
    ]


def test_the_time_to_go_is_that_of_the_last_run_on_the_same_device(gpu, tmp_path):
    about = {"device": "cuda:0", "name": "NVIDIA H100", "size": "full"}
    lines = [
        {"name": "a", "seconds": 5.0, "state": "done"},
        {"name": "b", "seconds": 9.0, "state": "ended"},
    ]
    (tmp_path / "r.json").write_text(json.dumps({**about, "checks": lines}))
    assert gpu._earlier(tmp_path / "r.json", about) == {"a": 5.0}
    assert gpu._earlier(tmp_path / "r.json", about | {"name": "another"}) == {}
    assert gpu._earlier(tmp_path / "none.json", about) == {}


def test_every_check_has_a_function_and_make_gpu_installs_nothing(gpu):
    for check in gpu.CHECKS:
        module, _, name = check.function.partition(":")
        assert callable(getattr(import_module(module), name)), check.name
    # make says its folders where another make runs it
    command = ["make", "--no-print-directory", "-n", "gpu", "DEVICE=cpu"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.strip().endswith("benchmarks/gpu.py --device cpu") and "pip" not in said


def found_by(part, function, place):
    """Run a check in this process and return what it found."""
    record, (module, name) = part("_gpu.record"), function
    place.work.mkdir(parents=True, exist_ok=True)
    told = place.work / "found.jsonl"
    getattr(part(module), name)(place, record.Found(told, on_gpu=False))
    return record.read_found(told)


class Event:
    """A CUDA event whose time is the host's."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = None

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def pretended(monkeypatch):
    """Let torch.cuda answer as if there were an H100, so that the lines for a GPU run.

    Tensors stay on the CPU.
    """
    properties = {
        "name": "NVIDIA H100",
        "major": 9,
        "minor": 0,
        "total_memory": 80 * 10**9,
        "multi_processor_count": 132,
    }
    properties |= {"memory_clock_rate": 2_619_000, "memory_bus_width": 5120}
    begun: list[bool] = []

    def reset(_device):
        assert begun, "torch resets no peak before CUDA was begun"

    answers = {
        "init": lambda: begun.append(True),
        "get_device_properties": lambda _device: SimpleNamespace(**properties),
        "mem_get_info": lambda _device: (79 * 10**9, 80 * 10**9),
        "Event": Event,
        "synchronize": lambda _device=None: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": reset,
        "max_memory_allocated": lambda _device: 123_000_000,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)


def test_the_environment_of_a_gpu_is_told(part, place, pretended):
    there = part("dataclasses").replace(place, device="cuda:0")
    found = found_by(part, ("_gpu.environment", "environment"), there)
    told = {line["what"]: line["value"] for line in found["figure"]}
    assert (told["device"], told["compute capability"], told["memory of the device"]) == (
        "NVIDIA H100",
        "9.0",
        "80.00 GB",
    )
    assert found["claim"][0]["met"] and "device, capability, driver, CUDA" not in {
        line["what"] for line in found["absent"]
    }
    assert part("_gpu.products").makers_speed(there) == pytest.approx(3.352e12, rel=1e-3)
    assert part("_gpu.products").makers_speed(place) is None


def test_calls_on_a_gpu_are_timed_between_its_events(part, pretended):
    clock = part("_gpu.products").Clock(device=CPU, rounds=3)
    clock.device = torch.device("cuda:0")
    assert 0.01 < clock.seconds(lambda: time.sleep(0.01), cold=False) < 0.5


def test_the_memory_of_a_gpu_is_that_of_each_stage_and_is_compared_with_its_plan(
    part, place, pretended, monkeypatch
):
    """The stages run on the CPU; what the device took, and what its plan says, are made up."""
    stages, api = part("_gpu.stages"), part("quantflow")
    ran = []
    monkeypatch.setattr(
        api,
        "measure",
        lambda *words, **options: ran.append(options) or SimpleNamespace(folder=place.work),
    )
    monkeypatch.setattr(
        api, "quantize", lambda *words, compute, **options: ran.append({"compute": compute})
    )
    monkeypatch.setattr(stages, "takes", lambda verb, option: True)
    planned = [{"stage": "measure", "peak_memory": 1e9, "device_memory": 2e8}]
    planned += [{"stage": "quantize", "peak_memory": 1e9, "device_memory": 1e8}]
    monkeypatch.setattr(stages, "quantflow", lambda *words: json.dumps({"stages": planned}))
    monkeypatch.setattr(stages, "peak_of", lambda words: 10**8)
    there = part("dataclasses").replace(place, device="cuda:0")
    found = found_by(part, ("_gpu.stages", "memory"), there)
    assert [options["compute"].device for options in ran] == ["cuda:0", "cuda:0"]
    assert [(line["what"], line["met"]) for line in found["claim"]] == [
        ("measure: memory of the device", True),
        ("quantize: memory of the device", False),
    ]


def test_the_share_of_equal_integers_is_counted_in_packed_words(part, tmp_path):
    stages = part("_gpu.stages")
    words = torch.tensor([[0x76543210, 0x0FEDCBA9]], dtype=torch.int32)
    for name, changed in (("a", 0), ("b", 0x00300004), ("c", None)):  # two integers of sixteen
        (tmp_path / name / "layers").mkdir(parents=True)
        tensors = (
            {"q.weight_scale": torch.ones(1)}
            if changed is None
            else {"q.weight_packed": words ^ changed}
        )
        save_file(tensors, tmp_path / name / "layers" / "00000.safetensors")
    assert stages.equal_integers(tmp_path / "a", tmp_path / "a") == 1
    assert stages.equal_integers(tmp_path / "b", tmp_path / "a") == (16 - 4) / 16  # in both words
    with pytest.raises(stages.Failed, match="c: no layer holds integers of 4 bits"):
        stages.equal_integers(tmp_path / "c", tmp_path / "c")


def test_two_ranks_are_compared_with_one_process(part, place, monkeypatch):
    """The commands are made up: what they write, and that a GPU alone has no second rank."""
    stages, asked, wrong = part("_gpu.stages"), [], {"by": 0.0}

    def pretended(*words, **_):
        words = [str(word) for word in words]
        asked.append(words)
        folder = Path(words[words.index("-o") + 1])
        if folder.name == "joined":
            (folder / "layers").mkdir(parents=True)
            (folder / "layers/00000.safetensors").write_bytes(b"bytes")
        elif folder.name in ("whole", "alone"):
            path = stages.statistics_of(folder)
            path.parent.mkdir(parents=True)
            save_file(
                {
                    "q|input|amax": torch.full(
                        [2], 1.0 + (0.0 if folder.name == "alone" else wrong["by"])
                    )
                },
                path,
            )
        return ""

    monkeypatch.setattr(stages, "quantflow", pretended)
    place.work.mkdir(parents=True)
    first = place.work / "first"
    (first / "layers").mkdir(parents=True)
    (first / "layers/00000.safetensors").write_bytes(b"bytes")
    for name, by, held in (
        ("right", 0.0, [True, True, True]),
        ("wrong", 1e-3, [True, True, False]),
    ):
        wrong["by"] = by
        there = part("dataclasses").replace(place, work=place.work / name)
        there.work.mkdir()
        told = there.work / "found.jsonl"
        stages.two_ranks(
            there, part("_gpu.record").Found(told, on_gpu=False), ["quantize", "model"], first=first
        )
        assert [line["met"] for line in part("_gpu.record").read_found(told)["claim"]] == held
    assert ["--device" in words for words in asked] == [False] * len(asked)
    assert [words[words.index("--tp") + 1] for words in asked if "--tp" in words] == ["2", "2"]
    (first / "layers/00000.safetensors").write_bytes(b"others")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    asked.clear()
    there = part("dataclasses").replace(place, work=place.work / "gpus", device="cuda:0")
    there.work.mkdir()
    stages.two_ranks(
        there,
        part("_gpu.record").Found(there.work / "f", on_gpu=True),
        ["quantize", "model"],
        first=first,
    )
    assert [line["met"] for line in part("_gpu.record").read_found(there.work / "f")["claim"]] == [
        False,
        True,
        False,
    ]
    # each takes the one of its number
    assert [words[-1] for words in asked if "--ranks" in words] == ["cuda", "cuda"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    there = part("dataclasses").replace(there, work=place.work / "gpu")
    there.work.mkdir()
    stages.two_ranks(
        there,
        part("_gpu.record").Found(there.work / "f", on_gpu=True),
        ["quantize", "model"],
        first=first,
    )
    found = part("_gpu.record").read_found(there.work / "f")
    assert found["claim"] == [] and found["absent"][0]["why"] == "torch finds 1"


def test_products_on_the_cpu_hold_and_bars_are_left_alone(part, place):
    found = found_by(part, ("_gpu.products", "products"), place)
    schemes = part("_gpu.products").SCHEMES
    assert len(found["claim"]) == 2 * len(schemes) and all(line["met"] for line in found["claim"])
    assert found["bar"] == [] and len(found["figure"]) >= 2 * len(schemes) + 3


@pytest.mark.slow
def test_a_kernel_with_wrong_outputs_is_found(part, place, monkeypatch):
    products = part("_gpu.products")
    choose = products.choose

    def wrong(case, **options):
        backend, reasons = choose(case, **options)
        return part("dataclasses").replace(
            backend, linear=lambda x, p, b: backend.linear(x, p, b) * 1.02
        ), reasons

    monkeypatch.setattr(products, "choose", wrong)
    found = found_by(part, ("_gpu.products", "products"), place)
    assert found["claim"] and not any(line["met"] for line in found["claim"])


@pytest.mark.slow
def test_a_scheme_that_does_not_run_leaves_the_others(part, place, monkeypatch):
    speed = part("_gpu.speed")
    made = speed.random_model

    def broken(shape, scheme, *, device):
        if scheme is not None and scheme.name == "W8A8":
            raise RuntimeError("CUDA error: an illegal memory access\nmore lines")
        return made(shape, scheme, device=device)

    monkeypatch.setattr(speed, "random_model", broken)
    found = found_by(part, ("_gpu.speed", "large"), place)
    (missed,) = found["claim"]
    assert (missed["what"], missed["found"], missed["met"]) == (
        "W8A8",
        "CUDA error: an illegal memory access",
        False,
    )
    told = {line["what"] for line in found["figure"]}
    for called in ("FP8", "FP8_DYNAMIC", "W4A16", "bfloat16"):
        assert {
            f"{called}: prefill",
            f"{called}: decode",
            f"{called}: decode, of a plain read of these bytes",
        } <= told
    assert any(line["what"].startswith("W4A16: decode, one sequence") for line in found["absent"])


def test_a_random_model_has_its_shape_and_counts_what_a_token_reads(part, place):
    speed, (shape,) = part("_gpu.speed"), place.amounts.shapes.values()
    plain = speed.random_model(shape, None, device=CPU)
    # one row of the embedding is next to nothing
    assert plain.read == shape.bytes - 2 * shape.vocab * shape.hidden
    assert sum(rows * columns for rows, columns in plain.layer_shapes) == shape.layer_weights
    eight = speed.random_model(shape, preset("FP8"), device=CPU)
    rest = plain.read - 2 * shape.layer_weights * shape.layers
    assert rest + shape.layer_weights * shape.layers <= eight.read < plain.read
    logits = eight.model(torch.arange(2, 10)[None]).logits
    assert logits.shape == (1, 8, shape.vocab) and bool(torch.isfinite(logits).all())


@pytest.mark.slow
def test_on_the_cpu_at_the_smallest_size_checks_run_and_hold(tmp_path):
    """The checks as `make gpu` runs them.

    Those that take minutes on a CPU are left out; docs/gpu-results.json has them.
    """
    names = ("environment", "measure", "generate", "graph", "large decoder", "memory", "peers")
    command = [
        sys.executable,
        BENCHMARKS / "gpu.py",
        "--device",
        "cpu",
        "--size",
        "smallest",
        "--patience",
        "5",
    ]
    command += ["--work", tmp_path / "work", "--peers", tmp_path, "--only", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = json.loads((tmp_path / "work/gpu-results.json").read_text())
    assert done.returncode == 0, done.stderr
    assert {check["name"]: check["state"] for check in results["checks"]} == dict.fromkeys(
        names, "done"
    )
    claims = {check["name"]: len(check["found"]["claim"]) for check in results["checks"]}
    assert claims["measure"] == 3 and claims["generate"] == 1 and claims["graph"] == 1
    absent = {line["what"] for check in results["checks"] for line in check["found"]["absent"]}
    assert {
        "llmcompressor",
        "gptqmodel",
        "vllm",
        "steps replayed as a CUDA graph",
        "memory of the device",
    } <= absent
    assert (tmp_path / "work/gpu-results.md").read_text() in done.stdout
    assert "7 of 7, peers" in done.stderr
