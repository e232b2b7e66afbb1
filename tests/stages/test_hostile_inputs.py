"""Damaged, foreign and hostile inputs of a user.

They end with a sentence, its exit code, and nothing raw for the terminal.
"""

import ctypes
import json
import os
import pickle
import pwd
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from starlette.testclient import TestClient

from quantflow.backends import native
from quantflow.exporting import export as export_stage
from quantflow.exporting.model_card import model_card
from quantflow.files.manifest import build_manifest, write_manifest
from quantflow.models import chat_template
from quantflow.models.chat_template import chat_tokens
from quantflow.models.panics import panics_refused
from quantflow.models.tokenizer import load_tokenizer
from quantflow.plain_text import one_line, plain
from quantflow.server import process
from quantflow.server.app import application
from quantflow.server.models import Models, open_model
from quantflow.server.settings import ServeJob
from quantflow.stages.cli.output import outline, table
from tests.shared import run, slow_but

HOSTILE = "\x1b[2J\x07evil\u202egnp.exe\nerror: all is well"


def reseal(folder):
    """Make every hash of a changed artifact right again."""
    body = json.loads((folder / "quantflow.json").read_text())
    for key in ("digest", "files", "layout_version"):
        body.pop(key)
    write_manifest(folder, build_manifest(folder, body=body))


@pytest.fixture
def refused(capsys):
    """Run a command line and return what is said with an exit code."""

    def check(codes, *arguments):
        capsys.readouterr()
        code = run(*arguments)
        out, err = capsys.readouterr()
        assert code in ((codes,) if isinstance(codes, int) else codes), err
        assert "Traceback" not in err and "a bug in quantflow" not in err and "panicked" not in err
        assert not any(
            ord(c) < 32 and c not in "\n\t" or 0x7F <= ord(c) < 0xA0 or ord(c) == 0x202E
            for c in out + err
        )
        return err

    return check


@pytest.fixture(scope="module")
def made(tmp_path_factory, llama):
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_stage, "_prove", lambda *_: {})
        assert run("quantize", llama, "-o", folder / "q", "--scheme", "W8A16") == 0
        assert run("export", folder / "q", "-o", folder / "a") == 0
    return folder / "a"


@pytest.fixture
def artifact(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "a"))


def edited(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    reseal(folder)


GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 320,
}
SHORT = ("--max-new-tokens", "1", "--max-input-tokens", "4")
GENERATE = ("--prompt", "value", "--max-new-tokens", "2")


@pytest.mark.parametrize(
    "values",
    [
        *({"hidden_act": "swiglu9000"}, {"rope_parameters": {"rope_type": "nowhere"}}),
        *(
            {"rope_parameters": [1]},
            {"max_position_embeddings": [[]]},
            {"rope_parameters": "default"},
        ),
        *(
            {"rms_norm_eps": None},
            {"num_hidden_layers": 10**9},
            {"vocab_size": -1},
            {"hidden_act": 5},
            {"eos_token_id": "</s>"},
        ),
        *(
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": 5}},
            {"quantization_config": []},
        ),
    ],
    ids=str,
)
def test_a_value_of_the_configuration_that_makes_no_model_is_a_sentence(values, artifact, refused):
    path = artifact / "config.json"
    config = json.loads(path.read_text())
    if isinstance(values.get("quantization_config"), dict):
        values = {
            "quantization_config": config["quantization_config"] | values["quantization_config"]
        }
    path.write_text(json.dumps(config | values))
    (artifact / "generation_config.json").unlink()
    reseal(artifact)
    refused((2, 3, 6), "generate", artifact, *GENERATE)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("value", [0, -1, "4", 1.5, 2**40, True, {"a": 1}], ids=repr)
def test_sizes_that_make_no_model_end_measure_and_quantize_with_a_sentence(
    value, family, llama, tmp_path, refused
):
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    text = tmp_path / "t.jsonl"
    text.write_text(json.dumps({"input_ids": [5] * 16}) + "\n")
    short = ("--calibration", text, "--samples", "1", "--sequence-length", "8")
    config = GPT2 if family == "gpt2" else json.loads((model / "config.json").read_text())
    sizes = (
        "num_hidden_layers",
        "hidden_size",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    for key in sizes[:4] if family == "gpt2" else sizes:  # gpt2's own names for them are others
        (model / "config.json").write_text(json.dumps({**config, key: value}))
        err = refused((2, 3, 6), "measure", model, "-o", tmp_path / "1", *short)
        assert "config.json" in err or key in err or "gpt2" in err or "checkpoint holds" in err, (
            key,
            err,
        )
        refused((2, 3, 6), "quantize", model, "-o", tmp_path / "2", "--scheme", "W8A8", *short)
        if key == "num_key_value_heads":  # weights are rounded by what the files say alone
            assert (
                key in refused((3,), "quantize", model, "-o", tmp_path / "3", "--scheme", "W8A16")
                or value == 2**40
            )


def test_a_configuration_that_leaves_out_how_many_layers_there_are_is_an_input_error(
    llama, tmp_path, refused
):
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    del config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config))  # transformers then makes 32
    (tmp_path / "t.jsonl").write_text(json.dumps({"input_ids": [5] * 16}) + "\n")
    short = ("--calibration", tmp_path / "t.jsonl", "--samples", "1", "--sequence-length", "8")
    assert "model.layers.10.input_layernorm.weight: needed by the model, not in" in refused(
        3, "measure", model, "-o", tmp_path / "1", *short
    )
    for scheme in ("W8A8", "W8A16"):
        assert "num_hidden_layers" in refused(
            3, "quantize", model, "-o", tmp_path / scheme, "--scheme", scheme, *short
        )


@pytest.mark.parametrize("value", ["</s>", [1, "2"], -1, 2**40, {"a": 1}, 1.5, True])
def test_end_tokens_that_are_no_numbers_are_an_input_error(value, artifact, refused):
    edited(artifact, "generation_config.json", eos_token_id=value)
    assert "eos_token_id" in refused(3, "generate", artifact, *GENERATE)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"model": 5}',
        b"[",
        b"\xff\xfe",
        b'{"version":"1.0","added_tokens":[{"id":-1}]}',
    ],
)
def test_a_damaged_tokenizer_is_an_input_error(content, artifact, refused):
    (artifact / "tokenizer.json").write_bytes(content)
    reseal(artifact)
    assert "tokenizer" in refused(3, "generate", artifact, *GENERATE)


def test_what_a_library_says_of_a_tokenizer_reaches_a_terminal_spelled_out(artifact, capfd):
    path = artifact / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"\x1b[31m\x07red": 1}))
    table = json.loads((artifact / "tokenizer.json").read_text())
    table["added_tokens"][0]["\x1b[31m\x07red"] = True
    (artifact / "tokenizer.json").write_text(json.dumps(table))
    with panics_refused("x", "y"):
        os.write(2, b"Ignored unknown kwarg option \x1b[31m\x07red \xc2\x9b \xc3\xa9\n")
    err = capfd.readouterr().err
    assert err == "Ignored unknown kwarg option \\x1b[31m\\x07red \\x9b é\n"
    load_tokenizer(artifact)
    out, err = capfd.readouterr()
    assert out == "" and "\\x1b[31m\\x07red" in err and "\x1b" not in err


def test_a_tokenizer_of_more_tokens_than_the_embedding_has_is_an_input_error(
    artifact, made, llama, tmp_path, refused
):
    path = artifact / "tokenizer.json"
    table = json.loads(path.read_text())
    table["added_tokens"].append(
        {
            "id": 50_000,
            "content": "value",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": False,
        }
    )
    vocabulary = table["model"]["vocab"]
    vocabulary["value"] = 50_000
    path.write_text(json.dumps(table))
    reseal(artifact)
    assert "token id 50000" in refused(3, "generate", artifact, *GENERATE)
    with serving(artifact) as ask:
        status, body = ask("/generate", {"inputs": "value"})
        assert (status, body["error_type"]) == (
            422,
            "validation",
        ) and "token 50000 is not one of" in body["error"]
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    shutil.copy(path, model)
    text = tmp_path / "t.txt"
    text.write_text("value " * 2000)
    short = ("--calibration", text, "--samples", "1", "--sequence-length", "8")
    for line in (
        ("measure", model, "-o", tmp_path / "1", *short),
        ("quantize", model, "-o", tmp_path / "2", "--scheme", "W8A8", *short),
        (
            "validate",
            made,
            "--baseline",
            model,
            "--text",
            text,
            "--tokens",
            "256",
            "--report",
            tmp_path / "3",
        ),
    ):
        assert "t.txt: token id 50000" in refused(3, *line)


def test_a_text_that_the_tokenizer_has_no_token_for_is_an_input_error(artifact, tmp_path, refused):
    table = {
        "version": "1.0",
        "added_tokens": [],
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "decoder": None,
    }
    table |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None}
    table["model"] = {"type": "WordLevel", "vocab": {"value": 5}, "unk_token": "[UNK]"}
    (artifact / "tokenizer.json").write_text(json.dumps(table))
    reseal(artifact)
    assert "cannot read the text" in refused(
        3, "generate", artifact, "--prompt", "other", "--max-new-tokens", "1"
    )
    (tmp_path / "t.txt").write_text("value value other\n")
    assert "t.txt" in refused(
        3, "calibration", "inspect", tmp_path / "t.txt", "--tokenizer", artifact
    )
    with serving(artifact) as ask:
        status, body = ask("/generate", {"inputs": "other"})
        assert (status, body["error_type"]) == (
            422,
            "validation",
        ) and "cannot read the text" in body["error"]
        assert ask("/tokenize", {"inputs": "other"})[0] == 422
        assert ask("/generate", {"inputs": "value", "parameters": {"max_new_tokens": 1}})[0] == 200


def test_an_expression_of_a_tokenizer_that_would_take_years_is_an_input_error_and_prints_nothing(
    artifact, capfd
):
    table = json.loads((artifact / "tokenizer.json").read_text())
    pattern = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    (artifact / "tokenizer.json").write_text(json.dumps(table | {"pre_tokenizer": pattern}))
    reseal(artifact)
    capfd.readouterr()
    assert run("generate", artifact, "--prompt", "a" * 60 + "b", "--max-new-tokens", "1") == 3
    out, err = capfd.readouterr()
    assert (
        out == ""
        and "cannot read the text" in err
        and "retry-limit" in err
        and len(err.splitlines()) == 2
    )
    with serving(artifact) as ask:
        status, body = ask("/generate", {"inputs": "a" * 60 + "b"})
        assert (status, body["error_type"]) == (
            422,
            "validation",
        ) and "cannot read the text" in body["error"]
        assert ask("/generate", {"inputs": "value", "parameters": {"max_new_tokens": 1}})[0] == 200


@contextmanager
def serving(folder):
    """Yield what asks a server of an artifact, without a socket."""
    job = ServeJob(artifact=folder, port=0)
    models = Models(job, open_model(folder, job))
    client = TestClient(application(process.site_of(job, models)), base_url="http://127.0.0.1")

    def ask(path, body):
        answer = client.post(path, json=body)
        return answer.status_code, answer.json()

    try:
        yield ask
    finally:
        models.close()


BOMBS = {
    "memory": "{{ 'x'.center(2 * 10 ** 9) }}",
    "doubling": "{% set n = namespace(x='xxxx') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x "
    "%}{% endfor %}{{ n.x }}",
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "syntax": "{% for %}",
    "error": "{{ messages.nothing.more }}{{ 1 // 0 }}",
    "sandbox": "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}{{ "
    "raise_exception('no') }}",
}


@pytest.mark.parametrize("name", slow_but(BOMBS, "memory", "time", "syntax", "error", "sandbox"))
def test_a_template_that_takes_time_memory_or_raises_is_an_input_error(
    name, artifact, refused, monkeypatch
):
    monkeypatch.setattr(chat_template, "SECONDS", 2.0)
    edited(artifact, "tokenizer_config.json", chat_template=BOMBS[name])
    assert "refused by the chat template" in refused(3, "generate", artifact, *GENERATE, "--chat")


def test_a_conversation_has_the_tokens_of_transformers_also_after_a_template_that_was_ended(
    artifact, monkeypatch
):
    tokenizer = load_tokenizer(artifact)
    messages = [
        {"role": "user", "content": "value é \U0001f600"},
        {"role": "assistant", "content": "a\nb"},
    ]
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    )
    template += "{% if add_generation_prompt %}>{% endif %}"
    for bomb in (None, BOMBS["time"]):
        if bomb is not None:
            monkeypatch.setattr(chat_template, "SECONDS", 0.5)
            tokenizer.chat_template = bomb
            with pytest.raises(Exception, match="takes more than 0.5 s"):
                chat_tokens(tokenizer, messages, where="x", answer=True)
            monkeypatch.undo()
        tokenizer.chat_template = template
        for answer in (True, False):
            expected = tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=answer, return_dict=False
            )
            assert chat_tokens(tokenizer, messages, where="x", answer=answer) == expected


@pytest.mark.parametrize("content", [f"text\n{'x' * 200_000}\n", "text\n\x00\n", "text\na,b,c\n"])
def test_fields_of_csv_that_are_too_long_or_too_many_are_a_sentence(
    content, artifact, tmp_path, refused
):
    (tmp_path / "p.csv").write_text(content)
    refused((0, 3), "generate", artifact, "--prompts", tmp_path / "p.csv", "--json", *SHORT)


def test_an_adapter_of_rank_0_is_an_input_error(artifact, tmp_path, refused):
    (tmp_path / "lora").mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file(
        {name.format("A"): torch.zeros(0, 64), name.format("B"): torch.zeros(64, 0)},
        tmp_path / "lora" / "adapter_model.safetensors",
    )
    assert "rank 0" in refused(3, "generate", artifact, *GENERATE, "--adapter", tmp_path / "lora")


CHANGED = {
    "verify": (),
    "inspect": (),
    "diff": ("{intact}",),
    "generate": GENERATE,
    "bench": ("--runs", "1"),
    "export": ("-o", "{out}", "--format", "gguf"),
    "validate": (
        "--baseline",
        "{model}",
        "--text",
        "{text}",
        "--tokens",
        "256",
        "--report",
        "{out}",
    ),
}


@pytest.mark.parametrize("verb", CHANGED)
def test_a_changed_byte_ends_every_verb_that_reads_it_with_7(
    verb, artifact, made, llama, text_files, tmp_path, refused
):
    path = artifact / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    names = {"intact": made, "out": tmp_path / "out", "model": llama, "text": text_files["heldout"]}
    line = (verb, artifact, *(word.format(**names) for word in CHANGED[verb]))
    assert "model.safetensors" in refused(7, *line)
    assert not names["out"].exists()
    if verb in ("inspect", "diff"):
        refused(0, *line, "--no-verify")


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "5", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2"},
    ],
    ids=str,
)
def test_ranks_that_are_none_are_a_usage_error_of_every_verb_that_reads_them(
    variables, made, llama, text_files, tmp_path, refused, monkeypatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for line in (
        ("measure", llama, "-o", tmp_path / "1", "--calibration", text_files["calibration"]),
        ("quantize", llama, "-o", tmp_path / "2", "--scheme", "W8A16"),
        ("unify", "-m", tmp_path, "-o", tmp_path / "3"),
        ("export", made, "-o", tmp_path / "4", "--format", "gguf"),
        ("validate", made, "--baseline", llama, "--text", text_files["heldout"]),
        ("generate", made, *GENERATE),
        ("bench", made, "--runs", "1"),
    ):
        assert "WORLD_SIZE" in refused(2, *line)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def recipe(llama, text_files, tmp_path):
    source = text_files["calibration"]
    text = f"model: {llama}\ncalibration: {{source: {source}, samples: 2, sequence_length: 8}}\n"
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{text}quantize: [{{name: a, scheme: W8A16, algorithm: rtn}}]\n")
    return path


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x WORLD_SIZE=2: not two numbers"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "RANK=0 WORLD_SIZE=two: not two numbers"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 WORLD_SIZE=2: not two numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 WORLD_SIZE=2: not a rank of a world of"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"},
            "MASTER_PORT=x: no address",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "-1"},
            "MASTER_PORT=-1: no address",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"},
            "MASTER_ADDR= MASTER_PORT=: no address",
        ),
    ],
    ids=str,
)
def test_a_run_of_ranks_that_are_none_is_a_usage_error(
    variables, said, recipe, tmp_path, refused, monkeypatch
):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert said in refused(2, "run", recipe, "-o", tmp_path / "out", "-q")


@pytest.mark.slow
@pytest.mark.parametrize("home", [None, "/dev/null/home"])
def test_verbs_work_for_a_user_without_a_home_or_with_one_that_cannot_be_written(
    home, made, llama, text_files, tmp_path, refused, monkeypatch
):
    for name in ("HOME", "XDG_CACHE_HOME", "QUANTFLOW_CACHE"):
        monkeypatch.delenv(name, raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)

    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    texts = (
        "--calibration",
        text_files["calibration"],
        "--samples",
        "2",
        "--sequence-length",
        "8",
        "-q",
    )
    native._attempt.cache_clear()
    try:
        for line in (
            ("measure", llama, "-o", tmp_path / "1", *texts),
            ("quantize", llama, "-o", tmp_path / "2", "--scheme", "W8A8", *texts),
            ("verify", made),
            ("inspect", made, "--backends"),
            ("generate", made, *GENERATE),
            ("bench", made, "--runs", "1", "--input-tokens", "4", "--new-tokens", "2"),
            (
                "validate",
                made,
                "--baseline",
                llama,
                "--text",
                text_files["heldout"],
                "--tokens",
                "512",
            ),
        ):
            refused((0, 4) if line[0] == "validate" else 0, *line)
    finally:
        native._attempt.cache_clear()


PROGRAMS = (
    *(
        "modeling_x.py",
        "configuration_x.py",
        "tokenization_x.py",
        "setup.py",
        "conftest.py",
        "sitecustomize.py",
    ),
    *("__init__.py", "torch.py", "custom_generate/generate.py"),
)
CODE = {
    "AutoConfig": "configuration_x.X",
    "AutoModelForCausalLM": "modeling_x.X",
    "AutoTokenizer": ["tokenization_x.X", None],
}


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.fixture
def with_code(llama, tmp_path):
    """A model whose folder holds code of every kind.

    With it comes the file that each code would make if it ran.
    """
    model, marker = Path(shutil.copytree(llama, tmp_path / "model")), tmp_path / "ran"
    for name in PROGRAMS:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(f"open({str(marker)!r}, 'w').close()\n")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scaler.pkl"):
        (model / name).write_bytes(pickle.dumps(Runs(marker)))
    if (compiler := shutil.which("cc")) is not None:
        source = (
            "#include <fcntl.h>\n__attribute__((constructor)) static void run(void) "
            '{ open("%s", O_CREAT | O_WRONLY, 0600); }\n'
        )
        (tmp_path / "x.c").write_text(source % marker)
        subprocess.run(
            [compiler, "-fPIC", "-shared", tmp_path / "x.c", "-o", model / "modeling_x.so"],
            check=True,
        )
        ctypes.CDLL(str(model / "modeling_x.so"))  # it does run, where somebody loads it
        marker.unlink()
    pickle.loads((model / "scaler.pkl").read_bytes()).close()
    marker.unlink()
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).write_text(
            json.dumps(json.loads((model / name).read_text()) | {"auto_map": CODE})
        )
    escape = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}"
        "{{ cycler.__init__.__globals__.os.system('touch %s') }}"
    )
    (model / "chat_template.jinja").write_text(escape % marker)
    return model, marker


def test_no_code_of_a_models_folder_runs_in_any_verb(
    with_code, text_files, tmp_path, refused, monkeypatch
):
    monkeypatch.setattr(export_stage, "_prove", lambda *_: {})
    model, marker = with_code
    texts = ("--calibration", text_files["calibration"], "--samples", "2", "--sequence-length", "8")
    judged = (
        "--baseline",
        model,
        "--text",
        text_files["heldout"],
        "--tokens",
        "512",
        "--report",
        tmp_path / "r",
    )
    for codes, line in (
        ((0,), ("calibration", "inspect", text_files["calibration"], "--tokenizer", model)),
        ((0,), ("measure", model, "-o", tmp_path / "m", *texts)),
        (
            (0,),
            (
                "quantize",
                "--no-export",
                model,
                "-o",
                tmp_path / "q",
                "--scheme",
                "W8A8",
                "--measurement",
                tmp_path / "m",
            ),
        ),
        ((0,), ("export", tmp_path / "q", "-o", tmp_path / "a")),
        ((0,), ("verify", tmp_path / "a")),
        ((0,), ("inspect", tmp_path / "a")),
        ((0,), ("generate", tmp_path / "a", *GENERATE)),
        ((0,), ("generate", tmp_path / "a", *GENERATE, "--decoder", "transformers")),
        ((3,), ("generate", tmp_path / "a", *GENERATE, "--chat")),
        (
            (0,),
            ("bench", tmp_path / "a", "--runs", "1", "--input-tokens", "4", "--new-tokens", "2"),
        ),
        ((0, 4), ("validate", tmp_path / "a", *judged)),
    ):
        refused(codes, *line)
        assert not marker.exists(), line
    with serving(tmp_path / "a") as ask:
        assert ask("/generate", {"inputs": "value", "parameters": {"max_new_tokens": 1}})[0] == 200
        assert (
            ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "value"}]})[0]
            == 422
        )
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"model_type": "x", "architectures": ["X"]})
    )
    refused((3, 6), "measure", model, "-o", tmp_path / "m2", *texts)
    (model / "model.safetensors").unlink()  # and now its weights are pickles
    refused(3, "quantize", model, "-o", tmp_path / "q2", "--scheme", "W8A16")
    assert not marker.exists()


def test_a_name_that_is_no_text_is_refused_before_any_work(llama, tmp_path, refused):
    name = os.fsdecode(b"bad\xff")
    assert "not UTF-8" in refused(2, "quantize", llama, "-o", tmp_path / name, "--scheme", "W8A16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "size", ["9" * 400, "1e400", "99999999999999999999GiB", "\x1b[31m4GiB", "-1", "0", "٣GiB"]
)
def test_absurd_sizes_are_usage_errors(size, llama, tmp_path, refused):
    for limit in ("--max-memory", "--max-disk"):
        refused(2, "quantize", llama, "-o", tmp_path / "q", "--scheme", "W8A16", f"{limit}={size}")


def test_names_reach_a_terminal_spelled_out(artifact, refused, capsys):
    assert plain(HOSTILE) == "\\x1b[2J\\x07evil\\u202egnp.exe\nerror: all is well"
    assert "\n" not in one_line(HOSTILE)
    assert len(table(("name",), [(HOSTILE,)]).splitlines()) == 3
    assert len(outline({"a": HOSTILE, HOSTILE: 1}).splitlines()) == 2
    body = json.loads((artifact / "quantflow.json").read_text())
    body["source"]["name"] = HOSTILE
    (artifact / "quantflow.json").write_text(json.dumps(body))
    reseal_manifest(artifact)
    refused(0, "inspect", artifact)
    refused(3, "inspect", artifact / HOSTILE)


def reseal_manifest(folder):
    from quantflow.files.canonical import digest_of, readable_json

    path = folder / "quantflow.json"
    body = json.loads(path.read_text())
    body.pop("digest")
    path.write_bytes(readable_json({**body, "digest": digest_of(body)}))


def test_a_name_cannot_end_the_front_matter_of_a_card_or_be_html_in_it(artifact):
    body = json.loads((artifact / "quantflow.json").read_text())
    body["source"]["name"] = "x\n---\nlicense: mit\n# <script>alert(1)</script> | a | b"
    card = model_card(body, {})
    lines = card.splitlines()
    assert [number for number, line in enumerate(lines) if line == "---"] == [0, 4]
    assert "<script>" not in card and not any(line.startswith("license") for line in lines)
