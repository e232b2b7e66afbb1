"""`generate`: where prompts come from, which way they are continued, and what is printed."""

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.exporting import export as export_stage
from quantflow.plain_text import plain
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime import generation as stage
from quantflow.runtime import prompt_files
from quantflow.runtime.decoding import Beams
from quantflow.runtime.prompt_files import encode, read_prompts
from quantflow.stages.generate import command, job_from
from tests.conftest import VOCABULARY
from tests.shared import run

PROMPTS = ("value scale", "round", "group layer token model")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, llama):
    """8-bit weights; lm_head stays in floats."""
    work = tmp_path_factory.mktemp("generate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_stage, "_prove", lambda *_: {})  # a fresh process: test_verbs has it
        assert (
            run("quantize", "--no-export", llama, "-o", work / "2", "--scheme", "W8A16", "-q") == 0
        )
        assert run("export", work / "2", "-o", work / "4", "-q") == 0
    return work / "4"


@pytest.fixture
def generate(artifact, capsys):
    """Run the verb with --json and return the document; stderr has to stay empty."""

    def call(*arguments, code=0):
        capsys.readouterr()
        assert run("generate", artifact, *arguments, "--json", "-q") == code, (
            capsys.readouterr().err
        )
        out, err = capsys.readouterr()
        assert code or err == ""
        return json.loads(out) if out else err

    return call


@pytest.mark.slow
def test_the_verb_gives_the_same_tokens_in_a_process_of_its_own(artifact, generate):
    words = ("--prompt", "def", "--max-new-tokens", "8", "--json", "-q")
    command = [sys.executable, "-m", "quantflow", "generate", str(artifact), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(result)["outputs"] == generate(*words[:4])["outputs"]


def test_the_number_of_threads_is_said_before_the_first_token(artifact, capsys):
    capsys.readouterr()
    assert run("generate", artifact, "--prompt", "def", "--max-new-tokens", "2") == 0
    assert re.search(r"^generate: threads: \d+ of \d+ usable cores$", capsys.readouterr().err, re.M)


def given(prompts=PROMPTS):
    return [part for prompt in prompts for part in ("--prompt", prompt)]


def texts(result):
    return [output["text"] for output in result["outputs"]]


def test_all_prompts_are_answered_in_order_whatever_the_batch(generate):
    alone = [texts(generate("--prompt", prompt, "--max-new-tokens", 6))[0] for prompt in PROMPTS]
    assert len(set(alone)) == 3
    for size in (1, 2, 3, 8):
        result = generate(*given(), "--max-new-tokens", 6, "--batch-size", size)
        assert [output["prompt"] for output in result["outputs"]] == list(PROMPTS)
        assert texts(result) == alone


def test_without_an_end_there_are_exactly_as_many_tokens_as_asked_for(generate):
    result = generate(*given(), "--max-new-tokens", 7, "--batch-size", 3, "--ignore-eos")
    assert [len(output["tokens"]) for output in result["outputs"]] == [7, 7, 7]
    assert result["timing"]["tokens"] == 21


def test_an_end_token_ends_a_text_unless_it_is_ignored(llama, tmp_path, capsys):
    model = shutil.copytree(llama, tmp_path / "model")
    line = ("generate", model, "--prompt", PROMPTS[0], "--max-new-tokens", 7, "--json", "-q")

    def tokens(*more):
        assert run(*line, *more) == 0
        return json.loads(capsys.readouterr().out)["outputs"][0]["tokens"]

    whole = tokens("--ignore-eos")
    for name in ("config.json", "generation_config.json"):
        if (model / name).exists():
            values = json.loads((model / name).read_text()) | {"eos_token_id": whole[3]}
            (model / name).write_text(json.dumps(values))
    assert tokens() == whole[: whole.index(whole[3]) + 1]
    assert tokens("--ignore-eos") == whole and len(whole) == 7


def test_a_limit_keeps_the_first_tokens_of_each_prompt_and_none_keeps_all(artifact, generate):
    words = AutoTokenizer.from_pretrained(artifact)
    rows = [words(prompt)["input_ids"] for prompt in PROMPTS]
    assert encode(PROMPTS, words, limit=None, chat=False) == rows
    assert encode(PROMPTS, words, limit=3, chat=False) == [row[:3] for row in rows]
    # nothing is filled up
    assert min(map(len, rows)) < 100 and encode(PROMPTS, words, limit=100, chat=False) == rows
    whole, cut = (
        generate("--prompt", PROMPTS[2], "--max-new-tokens", 5, *more)
        for more in ((), ("--max-input-tokens", 2))
    )
    assert texts(whole) != texts(cut)


def test_a_text_that_is_not_the_references_is_exit_4_and_both_are_shown(generate, tmp_path):
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    line = (
        "--prompts",
        tmp_path / "prompts.json",
        "--max-new-tokens",
        4,
        "--reference",
        tmp_path / "reference.json",
    )
    (tmp_path / "reference.json").write_text("{}")
    made = {output["prompt"]: output["text"] for output in generate(*line, code=4)["outputs"]}
    (tmp_path / "reference.json").write_text(json.dumps(made))
    assert generate(*line)["differing"] == []
    (tmp_path / "reference.json").write_text(json.dumps(made | {PROMPTS[1]: "another"}))
    assert generate(*line, code=4)["differing"] == [PROMPTS[1]]


def test_texts_are_written_as_a_reference_reads_them(generate, tmp_path):
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    line = ("--input_file", tmp_path / "prompts.json", "--max-new-tokens", 4)
    made = generate(*line, "--output_file", tmp_path / "texts.json")["outputs"]
    assert json.loads((tmp_path / "texts.json").read_text()) == {
        output["prompt"]: output["text"] for output in made
    }
    assert generate(*line, "--reference", tmp_path / "texts.json")["differing"] == []
    (tmp_path / "texts.json").write_text(json.dumps({PROMPTS[0]: "another"}))
    generate(
        *line, "--reference", tmp_path / "texts.json", "--output", tmp_path / "now.json", code=4
    )
    # also where the comparison fails
    assert set(json.loads((tmp_path / "now.json").read_text())) == set(PROMPTS)
    told = generate(
        *line,
        "--num-beams",
        2,
        "--num-return-sequences",
        2,
        "--output",
        tmp_path / "a.json",
        code=2,
    )
    assert "output with 2 texts per prompt" in told
    assert "no such folder for the texts" in generate(
        *line, "--output", tmp_path / "no" / "a.json", code=2
    )


def test_prompts_are_limited_first_and_repeated_then(generate, tmp_path):
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    line = ("--prompts", tmp_path / "prompts.json", "--limit", 2, "--max-new-tokens", 2)
    outputs = generate(*line, "--repeat", 3, "--batch-size", 4)["outputs"]
    assert [output["prompt"] for output in outputs] == [PROMPTS[0], PROMPTS[1]] * 3
    assert texts({"outputs": outputs}) == texts(generate(*line)) * 3
    assert "repeat=0" in generate(*line, "--repeat", 0, code=2)


def test_a_reference_that_fails_says_which_prompt(artifact, capsys, tmp_path):
    (tmp_path / "r.json").write_text(json.dumps({"value": "no"}))
    assert (
        run(
            "generate",
            artifact,
            "--prompt",
            "value",
            "--max-new-tokens",
            "2",
            "--reference",
            tmp_path / "r.json",
        )
        == 4
    )
    assert (
        "error: reference: 1 of 1 texts differ, the first after 'value'" in capsys.readouterr().err
    )


ROWS = [
    {"id": 1, "question": "first", "answer": "a"},
    {"id": 2, "question": "second\n\nline", "answer": "b"},
]
FILES = {
    "a.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "a.json": json.dumps(ROWS),
    "a.csv": 'id,question,answer\r\n1,first,a\r\n2,"second\n\nline",b\r\n',
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_its_column(tmp_path, name):
    (tmp_path / name).write_text(FILES[name])
    assert read_prompts(str(tmp_path / name), column="question") == ["first", "second\n\nline"]
    assert read_prompts(str(tmp_path / name), column="answer") == ["a", "b"]
    # in csv everything is text
    first = ["1", "2"] if name == "a.csv" else ["first", "second\n\nline"]
    assert read_prompts(str(tmp_path / name)) == first


def test_a_text_file_has_prompts_between_blank_lines_and_a_json_list_has_texts(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n\n\n")
    (tmp_path / "a.json").write_text('["one\\ntwo", "three"]')
    assert (
        read_prompts(str(tmp_path / "a.txt"))
        == read_prompts(str(tmp_path / "a.json"))
        == ["one\ntwo", "three"]
    )


def test_a_limit_takes_the_first_prompts(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([str(number) for number in range(9)]))
    assert read_prompts(str(tmp_path / "a.json"), limit=3) == ["0", "1", "2"]
    assert len(read_prompts(str(tmp_path / "a.json"), limit=99)) == 9
    with pytest.raises(UsageError, match="^limit=0; use 1 or more$"):
        read_prompts(str(tmp_path / "a.json"), limit=0)


@pytest.mark.parametrize(
    ("splits", "taken"),
    [(("train", "validation", "test"), "test"), (("train", "validation"), "validation")],
)
def test_of_a_folder_the_first_split_of_test_validation_and_train_is_taken(tmp_path, splits, taken):
    for split in splits:
        (tmp_path / f"{split}-00000.jsonl").write_text(json.dumps({"text": split}))
    assert read_prompts(str(tmp_path)) == [taken]


def test_a_hub_name_is_read_by_datasets_with_the_same_rules(monkeypatch):
    splits = {
        "train": [{"text": "wrong"}],
        "test": iter([{"id": 3, "text": "right"}, {"id": 4, "text": "too"}]),
    }
    monkeypatch.setitem(
        sys.modules,
        "datasets",
        SimpleNamespace(load_dataset={"somebody/questions": splits}.__getitem__),
    )
    monkeypatch.setattr(prompt_files, "find_spec", lambda _: True)
    monkeypatch.setattr(prompt_files, "require_reachable", lambda _: None)
    assert read_prompts("somebody/questions", limit=1) == ["right"]
    with pytest.raises(InputError, match="^nobody/nothing: .*; check the name and the network"):
        read_prompts("nobody/nothing")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("org/questions", "^org/questions: no file .* cannot be reached; check the path"),
        ("org/questions/test.jsonl", "^org/.*: no file or folder here, and no name of a data set"),
        ("questions?", "no file or folder here, and no name of a data set; check the path"),
    ],
)
def test_a_hub_that_does_not_answer_is_said_before_datasets_tries_again(monkeypatch, source, said):
    """The package tries again for half a minute, also for what is no name at all.

    huggingface/datasets issue 1939: behind a firewall it hangs until a time-out.
    UKGovernmentBEIS/inspect_ai pull request 5280: its time-outs, tried again or not.
    """
    called = []
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=called.append))
    monkeypatch.setattr(prompt_files, "find_spec", lambda _: True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as taken:  # bound and not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(InputError, match=said):
            read_prompts(source)
    assert not called


def test_what_an_absent_package_would_read_is_refused_with_its_name(monkeypatch, tmp_path):
    monkeypatch.setattr(prompt_files, "find_spec", lambda _: None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        UnsupportedError,
        match="a.parquet: parquet is read by pyarrow, which is not installed; install it",
    ):
        read_prompts(str(tmp_path / "a.parquet"))
    with pytest.raises(
        UnsupportedError,
        match="^somebody/questions: no file or folder here, and hub names are read by the",
    ):
        read_prompts("somebody/questions")


def test_parquet_gives_its_column(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert read_prompts(str(tmp_path / "a.parquet")) == ["first", "second\n\nline"]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.json", "{}", {}, "a.json: dict, a list is needed"),
        ("a.json", "[]", {}, "a.json: holds no prompt"),
        ("a.json", "[3]", {}, "a.json: row 1: int, a text or an object is needed"),
        ("a.json", '["x"]', {"column": "y"}, "a.json: row 1: a text, column y was asked for"),
        ("a.jsonl", '{"a": "x"}\n{"b": 1}', {}, "a.jsonl: row 2: no column with a text among b"),
        (
            "a.jsonl",
            '{"a": "x"}',
            {"column": "z"},
            "a.jsonl: row 1: no column z among a; give --column",
        ),
        (
            "a.jsonl",
            '{"a": 5}',
            {"column": "a"},
            "a.jsonl: row 1: a is int, a text or messages are needed",
        ),
        ("a.jsonl", '{"a": ', {}, "a.jsonl: line 1: not strict JSON"),
        ("a.xml", "x", {}, "a.xml: suffix '.xml' is not known; use one of .txt"),
        ("b/a.txt", "x", {}, "2 files, none of which is called test, validation, train"),
    ],
)
def test_files_that_hold_no_prompts_are_refused(tmp_path, name, content, options, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    source = path
    if path.parent != tmp_path:
        (path.parent / "c.txt").write_text("y")
        source = path.parent
    with pytest.raises((InputError, UsageError)) as caught:
        read_prompts(str(source), **options)
    assert message in str(caught.value)


@pytest.fixture
def chatting(artifact):
    words = AutoTokenizer.from_pretrained(artifact)
    words.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return words


def test_a_chat_goes_through_the_template_once_and_ends_where_the_answer_begins(chatting):
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]
    found = [chatting.decode(row) for row in encode(["why", talk], chatting, limit=None, chat=True)]
    assert found == ["<s>[user] why [assistant]", "<s>[system] be brief [user] why [assistant]"]


def test_messages_in_a_file_are_a_chat(tmp_path, chatting):
    talk = [{"role": "user", "content": "why"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": 3, "messages": talk}))
    prompts = read_prompts(str(tmp_path / "a.jsonl"))
    assert prompts == [talk]
    assert (
        chatting.decode(encode(prompts, chatting, limit=None, chat=False)[0])
        == "<s>[user] why [assistant]"
    )
    assert prompt_files.shown(prompts[0]) == "why"


def test_a_chat_prints_the_answer_alone_unless_both_are_asked_for(artifact, capsys, monkeypatch):
    plain_text = lambda messages, tokenizer, _: tokenizer(messages[0]["content"])["input_ids"]  # noqa: E731
    monkeypatch.setattr(prompt_files, "_from_chat", plain_text)
    line = (
        "generate",
        artifact,
        "--prompt",
        "value scale",
        "--max-new-tokens",
        "4",
        "--ignore-eos",
        "-q",
    )

    def printed(*more):
        assert run(*line, *more) == 0
        return capsys.readouterr().out

    whole, answer = printed(), printed("--chat")
    assert whole == f"value scale{answer}" and answer.strip()
    assert printed("--no-echo") == answer
    assert printed("--chat", "--echo") == f"value scale\n{answer}"
    both = printed("--prompt", "round", "--chat", "--echo").split("\n\n")
    assert [text.split("\n")[0] for text in both] == ["value scale", "round"]
    assert "value scale" not in printed("--prompt", "round", "--chat")
    assert "value scale" in printed("--prompt", "round")


def test_a_chat_without_a_template_is_refused(artifact, capsys):
    assert run("generate", artifact, "--prompt", "value", "--chat") == 2
    assert (
        "error: prompt 1: a chat, but the tokenizer has no chat template" in capsys.readouterr().err
    )


def test_a_prompt_without_a_token_is_refused(artifact):
    words = AutoTokenizer.from_pretrained(artifact)
    words._tokenizer.post_processor = None  # no BOS: nothing is left of an empty text
    with pytest.raises(
        UsageError, match="^prompt 2: '' has no token; give a text of a token or more$"
    ):
        encode(["x", ""], words, limit=None, chat=False)


def test_speculation_gives_the_greedy_text_in_fewer_forwards(generate, artifact, llama):
    line = ("--prompt", "value scale round value scale", "--max-new-tokens", 16, "--ignore-eos")
    plain = generate(*line)
    assert plain["timing"]["forwards"] == 16
    for more in (
        ("--assistant-model", artifact),
        ("--assistant-model", llama, "--assistant-tokens", 3),
    ):
        result = generate(*line, *more)
        assert texts(result) == texts(plain)
        assert result["timing"]["forwards"] < 14
    assert texts(generate(*line, "--prompt-lookup", 4)) == texts(plain)


def test_medusa_heads_of_a_folder_do_not_change_the_text(generate, artifact, tmp_path):
    head = load_file(next(artifact.glob("*.safetensors")))["lm_head.weight"].float()
    zeros = {"0.0.linear.weight": torch.zeros(64, 64), "0.0.linear.bias": torch.zeros(64)}
    save_file(
        {**zeros, "0.1.weight": head, "1.0.weight": head.clone()},
        tmp_path / "medusa_lm_head.safetensors",
    )
    line = ("--prompt", "value scale", "--max-new-tokens", 9)
    assert texts(generate(*line, "--medusa", tmp_path)) == texts(generate(*line))


@pytest.mark.parametrize("decoder", ["lean", "transformers"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"1.0.weight": (9, 64)}, "head 1 is [9, 64], the model's is [320, 64]"),
        ({"1.0.weight": (VOCABULARY, 32)}, "head 1 is [320, 32], the model's is [320, 64]"),
        ({"0.0.linear.weight": (64, 32)}, "head 0, weight of block 0 is [64, 32], the model's is"),
        ({"0.0.linear.bias": (1,)}, "head 0, bias of block 0 is [1], the model's is [64]"),
    ],
)
def test_medusa_heads_of_another_model_are_refused_before_a_token(
    change, why, decoder, artifact, tmp_path, capsys
):
    shapes = {"0.0.linear.weight": (64, 64), "0.0.linear.bias": (64,)}
    shapes |= {"0.1.weight": (VOCABULARY, 64), "1.0.weight": (VOCABULARY, 64)} | change
    heads = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(heads, tmp_path / "medusa_lm_head.safetensors")
    line = ("--prompt", "value scale", "--medusa", tmp_path, "--decoder", decoder)
    assert run("generate", artifact, *line) == 3
    out, err = capsys.readouterr()
    assert why in err and "give heads that were trained for this model" in err and not out


def test_beams_give_as_many_texts_per_prompt_as_asked_for(generate):
    line = (*given(), "--max-new-tokens", 5, "--num-beams", 4, "--batch-size", 2)
    result = generate(*line, "--num-return-sequences", 2)
    assert [output["prompt"] for output in result["outputs"]] == [
        prompt for prompt in PROMPTS for _ in range(2)
    ]
    assert texts(result)[::2] == texts(generate(*line))
    assert texts(result)[0] != texts(result)[1]


def test_words_are_never_or_always_said(generate):
    line = ("--prompt", "value scale", "--max-new-tokens", 8)
    said = generate(*line)["outputs"][0]
    word = "zero point"
    assert word not in said["text"]
    assert word in texts(generate(*line, "--num-beams", 3, "--force-words", word))[0]
    free = (
        texts(generate(*line, "--min-new-tokens", 8))[0]
        + texts(generate("--prompt", "round", "--max-new-tokens", 8))[0]
    )
    # the model is random: it says bytes
    often = next(character for character in free if character not in " \n\ufffd")
    assert often not in texts(generate(*line, "--bad-words", often))[0]


def test_a_text_ends_with_a_stop_string_in_every_row(generate):
    line = (*given(), "--max-new-tokens", 12, "--batch-size", 3, "--ignore-eos")
    free = generate(*line)["outputs"]
    stop = free[0]["text"][1:3]
    found = generate(*line, "--stop", stop)["outputs"]
    assert len(found[0]["tokens"]) < 12 and stop in found[0]["text"]
    for whole, cut in zip(free, found, strict=True):
        assert cut["tokens"] == whole["tokens"][: len(cut["tokens"])]
        assert len(cut["tokens"]) == 12 or stop in cut["text"]


def test_contrastive_search_is_certain_and_not_greedy(generate):
    line = ("--prompt", "value scale", "--max-new-tokens", 12)
    first, second = (texts(generate(*line, "--penalty-alpha", 0.6, "--top-k", 4)) for _ in range(2))
    assert first == second != texts(generate(*line))


def test_an_adapter_changes_the_text_and_is_merged_where_weights_are_floats(generate, tmp_path):
    names = {"model.layers.0.self_attn.q_proj": (64, 64), "lm_head": (320, 64)}
    tensors = {}
    for name, (rows, columns) in names.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(
            2, columns, generator=torch.Generator().manual_seed(1)
        )
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(
            rows, 2, generator=torch.Generator().manual_seed(2)
        )
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2})
    )
    line = ("--prompt", "value scale", "--max-new-tokens", 8)
    beside, merged = (
        generate(*line, "--adapter", tmp_path, *more) for more in ((), ("--merge-adapter",))
    )
    assert (beside["adapter"], merged["adapter"]) == (
        {"merged": 0, "beside": 2},
        {"merged": 1, "beside": 1},
    )
    assert texts(beside) == texts(merged) != texts(generate(*line))


def test_the_result_says_how_long_the_first_and_the_other_forwards_took(generate):
    timing = generate(*given(), "--max-new-tokens", 5, "--ignore-eos")["timing"]
    assert (timing["forwards"], timing["tokens"]) == (15, 15)
    assert timing["tokens_per_second"] == pytest.approx(15 / timing["seconds"])
    inside = 3 * timing["first_forward_seconds"] + 12 * timing["next_forward_seconds"]
    assert 0 < inside < timing["seconds"]


def test_the_result_says_of_each_batch_how_long_it_took_and_how_many_tokens_came(generate):
    timing = generate(*given(), "--max-new-tokens", 5, "--ignore-eos", "--batch-size", 2)["timing"]
    assert [(batch["prompts"], batch["tokens"]) for batch in timing["batches"]] == [(2, 10), (1, 5)]
    for batch in timing["batches"]:
        assert batch["tokens_per_second"] == pytest.approx(batch["tokens"] / batch["seconds"])
    assert 0 < sum(batch["seconds"] for batch in timing["batches"]) <= timing["seconds"]


def test_a_text_without_a_piece_still_shows_its_prompt(artifact, monkeypatch):
    monkeypatch.setattr(
        stage,
        "generate",
        lambda _decoder, ids, **_options: torch.cat([ids, torch.tensor([[1]])], dim=1),
    )
    pieces = []
    result = stage.run(stage.GenerateJob(artifact=artifact, prompts=("value",)), pieces.append)
    assert (pieces, texts(result)) == (["value"], [""])


def test_many_prompts_are_told_about_batch_by_batch(artifact, capsys):
    job = stage.GenerateJob(artifact=artifact, prompts=PROMPTS, max_new_tokens=2)
    pieces = []
    stage.run(job, pieces.append, ProgressLine(patience=0.0))
    assert pieces == []  # several texts are printed when they are whole
    err = capsys.readouterr().err
    assert "generate: batch 1 of 3" in err and "generate: batch 3 of 3" in err


def test_without_json_several_texts_stand_between_blank_lines(artifact, generate, capsys):
    outputs = generate(*given(), "--max-new-tokens", 3)["outputs"]
    assert run("generate", artifact, *given(), "--max-new-tokens", "3") == 0
    # a terminal gets no control characters
    texts = [plain(o["prompt"] + o["text"]) for o in outputs]
    assert capsys.readouterr().out == "\n\n".join(texts) + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "generate: no prompt"),
        (
            ("--prompt", "x", "--num-beams", 2, "--prompt-lookup", 3),
            "generate: several ways together",
        ),
        (
            ("--prompt", "x", "--length-penalty", 2),
            "generate: options of beams without --num-beams",
        ),
        (("--prompt", "x", "--force-words", "y"), "generate: force_words without beams"),
        (("--prompt", "x", "--merge-adapter"), "generate: merge without an adapter"),
        (("--prompt", "x", "--batch-size", 0), "batch_size=0"),
        (("--prompt", "x", "--max-input-tokens", -2), "max_input_tokens=-2"),
        (("--prompt", "x", "--penalty-alpha", 0.5, "--top-k", 1), "top_k=1 with penalty_alpha"),
        (("--prompt", "x", "--num-return-sequences", 2), "returned=2: 1 sequences differ"),
    ],
)
def test_options_that_do_not_go_together_are_exit_2(artifact, capsys, options, message):
    assert run("generate", artifact, *options) == 2
    # some are found when the model is there, below the line that says its threads
    lines = [line for line in capsys.readouterr().err.splitlines() if "threads: " not in line]
    assert lines[0].startswith(f"error: {message}")


def test_the_flags_make_the_job_that_they_name():
    flags = command.make_context(
        "generate", ["a", "--num-beams", "3", "--early-stopping", "never", "--top-p", "0.5"]
    )
    values = {
        name: value
        for name, value in flags.params.items()
        if name not in ("artifact", "as_json", "debug", "quiet")
    }
    job = job_from("a", values)
    assert job.method == Beams(count=3, early_stopping="never")
    assert (job.sampling.top_p, job.sampling.top_k, job.artifact) == (0.5, None, Path("a"))


def test_the_lean_decoder_and_transformers_modules_say_the_same_and_which_it_was(generate):
    lean, modules = (
        generate(*given(), "--decoder", decoder, "--max-new-tokens", "12")
        for decoder in ("auto", "transformers")
    )
    assert lean["decoder"] == {"name": "lean", "reasons": []}
    assert modules["decoder"]["name"] == "transformers"
    assert lean["outputs"] == modules["outputs"]


def test_an_artifact_runs_in_float16_in_transformers_modules_and_says_so(generate):
    found = generate(*given(), "-dt", "fp16", "--max-new-tokens", "12", "--ignore-eos")
    told = "the lean decoder is not used: it holds weights in float32 or bfloat16, not in float16"
    assert found["decoder"] == {"name": "transformers", "reasons": [told]}
    assert [len(output["tokens"]) for output in found["outputs"]] == [12] * len(PROMPTS)
    assert "2 ranks share the lean decoder" in generate(
        *given(), "--dtype", "float16", "--ranks", "2", code=6
    )


def test_a_smaller_cache_goes_with_the_lean_decoder_alone(generate, tmp_path):
    assert (
        generate(*given(), "--kv-cache", "int8", "--max-new-tokens", "2")["decoder"]["name"]
        == "lean"
    )
    told = generate(*given(), "--kv-cache", "int8", "--decoder", "transformers", code=2)
    assert "kv cache int8: the lean decoder has it, and is not used: it was not asked for" in told
    told = generate(*given(), "--decoder", "lean", "--disk-offload", code=2)
    assert "generate: disk_offload with decoder lean, kv_cache auto" in told
    told = generate(*given(), "--pack", "--disk-offload", code=2)
    assert "generate: disk_offload with decoder auto, kv_cache auto, pack True" in told


def test_a_length_counts_the_prompt_and_holds_for_each_row(generate, artifact):
    tokenizer = AutoTokenizer.from_pretrained(artifact)
    lengths = [len(tokenizer(prompt).input_ids) for prompt in PROMPTS]
    assert len(set(lengths)) > 1
    most = max(lengths) + 3
    whole = generate(*given(), "--max-new-tokens", most, "--ignore-eos", "--batch-size", 3)[
        "outputs"
    ]
    cut = generate(*given(), "--max-length", most, "--ignore-eos", "--batch-size", 3)["outputs"]
    assert [len(output["tokens"]) for output in cut] == [most - length for length in lengths]
    assert all(
        one["tokens"] == other["tokens"][: len(one["tokens"])]
        for one, other in zip(cut, whole, strict=True)
    )
    told = generate(*given(), "--max-length", max(lengths), code=2)
    assert f"{max(lengths)} tokens, max_length={max(lengths)}" in told
    assert "--max-length beside --max-new-tokens" in generate(
        *given(), "--max-length", 9, "--max-new-tokens", 3, code=2
    )
    beams = ("--num-beams", 2, "--batch-size", 3)
    assert "max_length with beams and batch_size=3" in generate(
        *given(), "--max-length", most, *beams, code=2
    )


def test_several_texts_follow_one_option_and_a_limit_of_minus_one_keeps_all(generate):
    once = generate("--prompt", *PROMPTS, "--max-new-tokens", 4, "--max-input-tokens", -1)
    zero = generate("--prompt", *PROMPTS, "--max-new-tokens", 4, "--max-input-tokens", 0)
    assert {**zero, "timing": None} == {**once, "timing": None}
    assert once["outputs"] == generate(*given(), "--max-new-tokens", 4)["outputs"]
    assert "max_input_tokens=x\n" in generate(*given(), "--max-input-tokens", "x", code=2)


def test_a_table_of_texts_by_length_is_chosen_from_by_the_length(tmp_path):
    (tmp_path / "one.json").write_text(
        json.dumps({"input": {"32": "value scale", "64": "group layer"}})
    )
    assert read_prompts(str(tmp_path / "one.json")) == ["value scale"]
    assert read_prompts(str(tmp_path / "one.json"), column="64") == ["group layer"]
    with pytest.raises(InputError, match="no column 128 among 32, 64"):
        read_prompts(str(tmp_path / "one.json"), column="128")
    (tmp_path / "two.json").write_text(
        json.dumps({"llama": {"32": "value"}, "gptj": {"32": "round"}})
    )
    assert read_prompts(str(tmp_path / "two.json"), column="gptj/32") == ["round"]
