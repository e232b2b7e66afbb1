"""The documents: their Python runs, their links lead somewhere.

Their figures are those of the tables.
"""

import dataclasses
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from quantflow.planning.recipe import Calibration, Quantize, Recipe, Validate, recipe_from

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
OURS = re.compile(
    r"`((?:quantflow|stages|tests|configs|benchmarks|examples|docs)/[\w./-]+\.(?:py|c|md|yaml|svg))`"
)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page as GitHub makes them of its headings."""
    headings = re.findall(
        r"^#+ (.*)$",
        re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE),
        re.MULTILINE,
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def notebook_folder(tmp_path, llama, text_files, monkeypatch):
    """The current folder, with the texts and a model that the pages speak of.

    Groups of 128 divide the model.
    """
    torch.manual_seed(0)
    shape = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        **shape, vocab_size=320, max_position_embeddings=64, bos_token_id=0, eos_token_id=1
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    PreTrainedTokenizerFast.from_pretrained(llama).save_pretrained(tmp_path / "llama")
    (tmp_path / "text.jsonl").symlink_to(text_files["calibration"])
    (tmp_path / "heldout.jsonl").symlink_to(text_files["heldout"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_python_of_the_page_about_python_runs_as_printed(notebook_folder, capsys):
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(blocks[0].strip().splitlines()) <= 15  # about ten, with blank lines and imports
    names = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    said = capsys.readouterr().out
    assert names["result"].outcome in ("pass", "fail", "inconclusive")
    assert names["answer"]["outputs"][0]["text"] in said
    assert "W4A61" in said
    assert (notebook_folder / "work/fp8/quantflow.json").exists() and (
        notebook_folder / "work/int8/quantflow.json"
    ).exists()
    assert names["tokens"].shape[0] == 1


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_paths_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, anchor = unquote(target).partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{name(page)}: {target}"
        assert not anchor or anchor in anchors(there), f"{name(page)}: {target}"
    if page.name != "CHANGELOG.md":  # which speaks of what is gone
        missing = [path for path in OURS.findall(text) if not (ROOT / path).exists()]
        assert not missing, f"{name(page)}: {missing}"


def test_every_row_of_what_other_programs_confirmed_names_a_test_that_is_there():
    text = (ROOT / "docs/formats.md").read_text()
    (head, _, *rows) = (
        line
        for line in text.split("What other programs confirmed")[1].splitlines()
        if line.startswith("|")
    )
    rows = rows[
        : next((at for at, row in enumerate(rows) if row.count("|") != head.count("|")), len(rows))
    ]
    assert len(rows) >= 13
    for row in rows:
        file, test = re.search(r"`(\w+\.py)::(test_\w+)` \|$", row).groups()
        assert f"\ndef {test}(" in (ROOT / "tests/parity" / file).read_text(), row


def test_every_page_is_reached_from_the_readme():
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r"\(docs/(\w[\w-]*\.md)", (ROOT / "README.md").read_text())) >= pages


def test_the_picture_of_the_peers_is_drawn_from_the_tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import peers_picture

    assert (ROOT / "docs/peers.svg").read_text() == peers_picture.picture()
    sys.modules.pop("peers_picture")


def test_the_figures_of_the_readme_are_those_of_the_tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import peers_picture

    readme = ROOT / "README.md"
    losses = _losses(peers_picture.table)
    compared = peers_picture.table(readme, "model | scheme")
    assert len(compared) == 11
    for row in compared:
        programs = losses[row["model"], row["scheme"]]
        ours = programs["quantflow " + row["quantflow"]]
        rivals = ("GPTQ", "matrix") if row["quantflow"] == "gptq" else ("",)
        others = {
            program: kld
            for program, kld in programs.items()
            if not program.startswith("quantflow") and any(word in program for word in rivals)
        }
        theirs = others[row["other program"]]
        assert (row["loss"], row["its loss"]) == (ours, theirs), row
        assert theirs == min(others.values(), key=float), row
        assert row["ratio"] == f"{float(ours) / float(row['its loss']):.2f}x"

    tables = [
        peers_picture.table(
            ROOT / "benchmarks/README.md", "program | prefill tokens/s", after=f"{many} at once:"
        )
        for many in ("One", "Eight")
    ]
    single, eight = ({row["program"]: row for row in rows} for rows in tables)
    shown = peers_picture.table(readme, "program | prefill")
    assert len(shown) == 8
    for row in shown:
        program = row["program"]
        assert row["prefill"] == single[program]["prefill tokens/s"]
        assert row["decode"] == single[program]["decode tokens/s"]
        assert row["decode, 8 at once"] == eight[program]["decode tokens/s"]
    sys.modules.pop("peers_picture")


def test_the_figures_of_the_page_about_choosing_are_those_of_the_tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import peers_picture

    table = peers_picture.table
    losses, speeds = _losses(table), {}
    for many, column in (("One", "decode"), ("Eight", "decode, 8 at once")):
        measured = ROOT / "benchmarks/README.md"
        for row in table(measured, "program | prefill tokens/s", after=f"{many} at once:"):
            speed = speeds.setdefault(row["program"].removeprefix("quantflow "), {})
            speed.setdefault("prompt", row["prefill tokens/s"])
            speed[column] = row["decode tokens/s"]
    compared = 0
    for row in table(ROOT / "docs/choosing.md", "machine and engine | scheme"):
        scheme = row["scheme"].split(",")[0]
        program = "quantflow " + row["algorithm"].split(" ")[0]
        for model, groups in (("tiny-llama", " g128"), ("SmolLM2", " g64")):
            measured = losses.get((model, scheme + groups * (scheme == "W4A16")), {})
            if row[f"loss, {model}"] and program in measured:
                assert abs(float(row[f"loss, {model}"]) - float(measured[program])) < 5e-6, row
                compared += 1
        for column in ("prompt", "decode", "decode, 8 at once"):
            assert not row[column] or row[column] == speeds[scheme][column], row
    assert compared == 7
    sys.modules.pop("peers_picture")


def _losses(table: Callable[..., list[dict[str, str]]]) -> dict[tuple[str, str], dict[str, str]]:
    """Mean KLD of each program by model and scheme, from docs/accuracy.md and docs/smollm2.md."""
    accuracy, smollm2 = ROOT / "docs/accuracy.md", ROOT / "docs/smollm2.md"
    losses = defaultdict(dict)
    for row in table(accuracy, "model | program"):
        losses[row["model"], row["scheme"]][row["program"]] = row["KLD mean"]
    for column, after in (("scheme", "## 4-bit floats"), ("type", "## llama.cpp's types")):
        for row in table(accuracy, f"{column} | program", after=after):
            losses["tiny-llama", row[column]][row["program"]] = row["KLD mean"]
    for row in table(smollm2, "scheme | program", after="## 4-bit floats"):
        losses["SmolLM2", row["scheme"]][row["program"].replace("`", "")] = row["mean KLD"]
    for after in ("## Beside AutoRound", "## Beside llm-compressor"):
        for row in table(smollm2, "program | bits per weight", after=after):
            program, _, scheme = row["program"].replace("`", "").partition(", W4A16")
            if scheme or ", file" not in program:
                losses["SmolLM2", "W4A16 g64"][program] = row["mean KLD"]
    return losses


def test_no_page_speaks_of_private_modules():
    for page in PAGES:
        assert not re.search(r"stages[/.]_", page.read_text()), name(page)


def test_the_recipe_of_the_page_has_every_key_and_its_defaults():
    (text,) = re.findall(
        r"^```yaml\n(.*?)^```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL | re.MULTILINE
    )
    data = yaml.safe_load(text)
    recipe = recipe_from(data)
    assert set(data) == {field.name for field in dataclasses.fields(Recipe)}
    assert [
        field.name
        for field in dataclasses.fields(Quantize)
        if not re.search(rf"\b{field.name}\b", text)
    ] == []
    plain = Recipe(
        model="./llama",
        calibration=Calibration(source="text.jsonl"),
        validate=Validate(text="heldout.jsonl"),
    )
    assert dataclasses.replace(recipe, quantize=()) == plain
    assert set(data["validate"]) == {field.name for field in dataclasses.fields(Validate)}
    named, examples = Quantize(name="int4", scheme="W4A16"), {"ignore", "overrides"}
    for key in data["quantize"][1].keys() - examples:
        assert getattr(recipe.quantize[1], key) == getattr(named, key), key


def test_the_readme_counts_families_as_their_table_does():
    table, readme = ((ROOT / name).read_text() for name in ("docs/families.md", "README.md"))
    found = re.search(r"- W4A16: (\d+) of (\d+) types pass", table)
    assert found is not None
    assert (
        f"Of {found[2]} types of causal LMs" in readme
        and f"[{found[1]} pass](docs/families.md)" in readme
    )
