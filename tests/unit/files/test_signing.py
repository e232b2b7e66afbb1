"""Signatures of artifacts: a refusal names the changed file, the key or the certificate; exit 7."""

import base64
import datetime
import functools
import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from quantflow.errors import InputError, IntegrityError, UsageError
from quantflow.exporting import export as export_stage
from quantflow.files import sealed
from quantflow.files.canonical import digest_of, readable_json
from quantflow.files.required_signature import RequiredSignature
from quantflow.files.signing import Signer, Trusted, require_signature, sign
from quantflow.files.verify import verify
from quantflow.runtime.load import load
from quantflow.server import process, vllm
from quantflow.server.models import open_model
from quantflow.server.settings import ServeJob

pytest.importorskip("model_signing")  # the extra `sign`
import model_signing
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.conftest import write_model
from tests.shared import run, slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries below


def key_pair(folder, name):
    """Write a private and a public key."""
    key = ec.generate_private_key(ec.SECP256R1())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def certificates(folder, name, *, begin, end):
    """Write a root, and a key with a certificate from it, valid between two days from now."""
    now = datetime.datetime.now(datetime.UTC)
    span = [now + datetime.timedelta(days=days) for days in (begin, end)]
    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = [
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
        for text in (f"{name} root", name)
    ]

    def made(subject, public, ca):
        builder = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(names[0]).public_key(public)
        )
        builder = builder.serial_number(x509.random_serial_number())
        whole = [now - datetime.timedelta(days=900), now + datetime.timedelta(days=900)]
        builder = builder.not_valid_before((whole if ca else span)[0]).not_valid_after(
            (whole if ca else span)[1]
        )
        usage = {"digital_signature": not ca, "key_cert_sign": ca, "crl_sign": ca} | dict.fromkeys(
            (
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "encipher_only",
                "decipher_only",
            ),
            False,
        )
        builder = builder.add_extension(
            x509.BasicConstraints(ca=ca, path_length=None), critical=True
        )
        return builder.add_extension(x509.KeyUsage(**usage), critical=True).sign(
            root_key, hashes.SHA256()
        )

    paths = [folder / f"{name}-{part}.pem" for part in ("root", "certificate", "key")]
    paths[0].write_bytes(
        made(names[0], root_key.public_key(), True).public_bytes(serialization.Encoding.PEM)
    )
    paths[1].write_bytes(
        made(names[1], key.public_key(), False).public_bytes(serialization.Encoding.PEM)
    )
    plain = serialization.NoEncryption()
    paths[2].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    return paths


@pytest.fixture(scope="module")
def work(tmp_path_factory, llama):
    """An artifact, two pairs of keys."""
    folder = tmp_path_factory.mktemp("signed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_stage, "_prove", lambda *_: {})
        assert run("quantize", llama, "-o", folder / "q", "--scheme", "W8A16") == 0
        assert run("export", folder / "q", "-o", folder / "artifact") == 0
    for name in ("mine", "theirs"):
        key_pair(folder, name)
    return folder


@pytest.fixture
def artifact(work, tmp_path):
    """A copy of the artifact, signed with my key."""
    folder = Path(shutil.copytree(work / "artifact", tmp_path / "artifact"))
    assert run("sign", folder, "--key", work / "mine.pem") == 0
    return folder


def test_a_signed_artifact_verifies_with_the_key_and_stays_as_it_is(work, artifact, capsys):
    capsys.readouterr()
    assert run("verify", artifact, "--key", work / "mine.pub", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [Path(path).name for path in told["signature"]] == [
        "artifact.sig",
        "artifact.intoto.json",
        "artifact.cdx.json",
    ]
    assert sorted(path.name for path in artifact.iterdir()) == sorted(
        path.name for path in (work / "artifact").iterdir()
    )


def test_the_provenance_names_every_source_file_the_recipe_and_the_tools(artifact):
    manifest = json.loads((artifact / "quantflow.json").read_text())
    statement = json.loads(artifact.with_name("artifact.intoto.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    built = statement["predicate"]["buildDefinition"]
    assert {
        row["name"]: row["digest"]["sha256"] for row in built["resolvedDependencies"]
    } == manifest["source"]["files"]
    assert built["externalParameters"]["recipe"]["scheme"] == "W8A16"
    assert statement["predicate"]["runDetails"]["builder"]["version"] == manifest["tools"]
    hashes_of = {row["name"]: row["digest"].get("sha256") for row in statement["subject"]}
    assert hashes_of["model.safetensors"] == manifest["files"]["model.safetensors"]["sha256"]
    bom = json.loads(artifact.with_name("artifact.cdx.json").read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert bom["metadata"]["component"]["type"] == "machine-learning-model"
    assert bom["metadata"]["component"]["version"] == manifest["digest"]


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def resealed(folder):
    """Change the manifest and correct its digest, which nobody needs the key for."""
    path = folder / "quantflow.json"
    manifest = json.loads(path.read_text())
    manifest["source"]["name"] = "a better model"
    manifest.pop("digest")
    path.write_bytes(readable_json({**manifest, "digest": digest_of(manifest)}))
    verify(folder)  # which finds nothing


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: flipped(folder / "model.safetensors"), "model.safetensors"),
        (lambda folder: flipped(folder / "tokenizer.json"), "tokenizer.json"),
        (resealed, "quantflow.json"),
        (lambda folder: (folder / "more.txt").write_text("x"), "more.txt"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: flipped(folder.with_name("artifact.intoto.json")), "artifact.intoto.json"),
        (lambda folder: flipped(folder.with_name("artifact.cdx.json")), "artifact.cdx.json"),
    ],
    ids=["weights", "tokenizer", "manifest", "added", "removed", "provenance", "bom"],
)
def test_what_was_changed_is_named_with_exit_7(change, said, work, artifact, capsys):
    change(artifact)
    assert run("verify", artifact, "--key", work / "mine.pub") == 7
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told
    if said != "artifact.cdx.json" and said != "artifact.intoto.json":
        with pytest.raises(IntegrityError):
            require_signature(artifact, Trusted(key=work / "mine.pub"))


def test_another_key_is_named_with_exit_7(work, artifact, capsys):
    assert run("verify", artifact, "--key", work / "theirs.pub") == 7
    assert "theirs.pub" in capsys.readouterr().err


def test_the_signature_of_another_artifact_by_the_same_key_and_an_older_signature_are_exit_7(
    work, artifact, tmp_path, capsys
):
    other = Path(shutil.copytree(work / "artifact", tmp_path / "other"))
    resealed(other)
    assert run("sign", other, "--key", work / "mine.pem") == 0
    for suffix in (".sig", ".intoto.json", ".cdx.json"):
        mine, theirs = artifact.with_name(f"artifact{suffix}"), other.with_name(f"other{suffix}")
        before = mine.read_bytes()
        assert before != theirs.read_bytes()
        shutil.copy(theirs, mine)
        capsys.readouterr()
        assert run("verify", artifact, "--key", work / "mine.pub") == 7
        assert mine.name in capsys.readouterr().err
        mine.write_bytes(before)
    assert run("verify", artifact, "--key", work / "mine.pub") == 0
    resealed(artifact)  # a newer artifact, and what was signed of the one before
    assert run("verify", artifact, "--key", work / "mine.pub") == 7
    bundle = json.loads(artifact.with_name("artifact.sig").read_text())
    for envelope in (
        {"payload": "", "signatures": []},
        {**bundle["dsseEnvelope"], "signatures": []},
    ):
        artifact.with_name("artifact.sig").write_text(
            json.dumps({**bundle, "dsseEnvelope": envelope})
        )
        assert run("verify", artifact, "--key", work / "mine.pub") == 7


def test_a_certificate_verifies_that_leads_to_the_root_and_none_that_expired_or_leads_elsewhere(
    work, tmp_path
):
    folder = Path(shutil.copytree(work / "artifact", tmp_path / "artifact"))
    root, certificate, key = certificates(tmp_path, "good", begin=-1, end=30)
    other, *_ = certificates(tmp_path, "other", begin=-1, end=30)
    sign(folder, Signer(key=key, certificate=certificate, chain=(root,)))
    require_signature(folder, Trusted(roots=(root,)))
    with pytest.raises(IntegrityError, match="not a signature of"):
        require_signature(folder, Trusted(roots=(other,)))
    root, certificate, key = certificates(tmp_path, "old", begin=-60, end=-30)
    sign(folder, Signer(key=key, certificate=certificate, chain=(root,)))
    with pytest.raises(IntegrityError, match="expired on"):
        require_signature(folder, Trusted(roots=(root,)))
    assert run("verify", folder, "--certificate", root) == 7
    root, certificate, key = certificates(tmp_path, "early", begin=30, end=60)
    sign(folder, Signer(key=key, certificate=certificate, chain=(root,)))
    with pytest.raises(IntegrityError, match="valid from"):
        require_signature(folder, Trusted(roots=(root,)))


def test_no_signature_and_keys_that_are_none_are_input_errors(work, tmp_path, artifact):
    plain = Path(shutil.copytree(work / "artifact", tmp_path / "plain"))
    with pytest.raises(InputError, match="no signature"):
        require_signature(plain, Trusted(key=work / "mine.pub"))
    (tmp_path / "junk.pem").write_text("junk")
    for key in (tmp_path / "junk.pem", tmp_path / "nowhere.pem"):
        assert run("sign", plain, "--key", key) == 3
        assert run("verify", artifact, "--key", key) == 3
    artifact.with_name("artifact.sig").write_text("{}")
    with pytest.raises(IntegrityError, match="not a signature"):
        require_signature(artifact, Trusted(key=work / "mine.pub"))


@pytest.mark.parametrize("where", ["a relative name", "an absolute name"])
def test_files_that_a_hub_adds_are_not_signed_however_the_artifact_is_named(
    where, work, tmp_path, monkeypatch
):
    folder = Path(shutil.copytree(work / "artifact", tmp_path / "artifact"))
    monkeypatch.chdir(tmp_path)
    name = "artifact" if where == "a relative name" else folder
    assert run("sign", name, "--key", work / "mine.pem") == 0
    (folder / "README.md").write_text("a page that a hub shows")
    for place in (Path("artifact"), folder):
        assert run("verify", place, "--key", work / "mine.pub") == 0
        assert load(place, require_signature=work / "mine.pub").decoder


def test_a_file_that_a_hub_adds_counts_where_the_signature_is_over_it(work, tmp_path):
    """An earlier version signed README.md where the artifact was named relative to a folder."""
    folder = Path(shutil.copytree(work / "artifact", tmp_path / "artifact"))
    (folder / "README.md").write_text("signed")
    config = model_signing.signing.Config().use_elliptic_key_signer(
        private_key=work / "mine.pem", password=None
    )
    config.sign(folder, tmp_path / "artifact.sig")
    key = Trusted(key=work / "mine.pub")
    require_signature(folder, key)
    load(folder, require_signature=key)
    (folder / "README.md").write_text("other")
    for refuse in (require_signature, lambda folder, key: load(folder, require_signature=key)):
        with pytest.raises(IntegrityError, match=r"README\.md"):
            refuse(folder, key)


def test_options_that_do_not_go_together_are_usage_errors(work, artifact):
    with pytest.raises(UsageError, match="key and certificate"):
        Trusted(key=work / "mine.pub", roots=(work / "mine.pub",))
    with pytest.raises(UsageError, match="identity to compare with"):
        Trusted(identity="me@example.com")
    assert run("sign", artifact) == 2
    assert run("sign", artifact, "--sigstore", "--key", work / "mine.pem") == 2


def test_generate_runs_what_the_key_signed_alone(work, artifact, capsys):
    line = (
        "generate",
        artifact,
        "--prompt",
        "value",
        "--max-new-tokens",
        "2",
        "--require-signature",
    )
    assert run(*line, work / "mine.pub") == 0
    assert run(*line, work / "theirs.pub") == 7
    assert run("bench", artifact, "--require-signature", work / "theirs.pub") == 7
    with pytest.raises(IntegrityError):
        load(artifact, require_signature=work / "theirs.pub")
    with pytest.raises(IntegrityError):
        load(artifact, require_signature=Trusted(key=work / "theirs.pub"))


@pytest.fixture
def talked(monkeypatch, tmp_path):
    """A chat template, and a line of stdin."""
    monkeypatch.setattr("sys.stdin", io.StringIO("value\n"))
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    return tmp_path / "chat.jinja"


def test_serve_and_chat_run_what_was_signed_alone(work, artifact, talked, capsys, monkeypatch):
    chat = ("chat", artifact, "--chat-template", talked, "--max-new-tokens", "2")
    assert run(*chat, "--require-signature", work / "mine.pub") == 0
    started = []
    monkeypatch.setattr(process, "_serve", lambda job, *_: started.append(job.artifact))
    serve = ("serve", artifact, "--port", "0", "-q")
    assert run(*serve, "--require-signature", work / "mine.pub") == 0 and len(started) == 1
    for line in (chat, serve):
        capsys.readouterr()
        assert run(*line, "--require-signature", work / "theirs.pub") == 7
        assert "signature" in capsys.readouterr().err
        assert run(*line, "--require-certificate", work / "mine.pub") in (3, 7)
        assert run(*line, "--require-identity", "me@example.com") == 2
        assert (
            run(
                *line,
                "--require-signature",
                work / "mine.pub",
                "--require-identity",
                "me@example.com",
            )
            == 2
        )
    (artifact.with_name(f"{artifact.name}.sig")).unlink()
    assert (
        run(*serve, "--require-signature", work / "mine.pub") == 3
        and run(*chat, "--require-signature", work / "mine.pub") == 3
    )
    assert len(started) == 1


def test_serve_and_chat_know_certificates(work, talked, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(work / "artifact", tmp_path / "artifact"))
    root, certificate, key = certificates(tmp_path, "us", begin=-1, end=1)
    other, *_ = certificates(tmp_path, "others", begin=-1, end=1)
    sign(folder, Signer(key=key, certificate=certificate, chain=(root,)))
    monkeypatch.setattr(process, "_serve", lambda *_: None)
    chat = ("chat", folder, "--chat-template", talked, "--max-new-tokens", "1")
    for line in (chat, ("serve", folder, "--port", "0", "-q")):
        assert run(*line, "--require-certificate", other, "--require-certificate", root) == 0
        assert run(*line, "--require-certificate", other) == 7


def test_every_model_of_a_server_has_to_be_signed(work, artifact, tmp_path):
    folder = Path(shutil.copytree(work / "artifact", tmp_path / "other"))
    job = ServeJob(
        artifact=artifact,
        signature=RequiredSignature(key=work / "mine.pub"),
        models=(f"b={folder}",),
    )
    open_model(artifact, job)
    with pytest.raises(InputError, match="no signature"):
        open_model(folder, job)


def test_a_signature_of_a_model_on_a_server_is_a_usage_error(work):
    assert run("chat", "--url", "http://127.0.0.1:9", "--require-signature", work / "mine.pub") == 2


def test_a_damaged_artifact_is_not_signed(work, tmp_path):
    folder = Path(shutil.copytree(work / "artifact", tmp_path / "artifact"))
    flipped(folder / "model.safetensors")
    assert run("sign", folder, "--key", work / "mine.pem") == 7
    assert not (tmp_path / "artifact.sig").exists()


# Another process that may write to the artifact's folder, between check and load.

RACED = ("model.safetensors", "config.json", "tokenizer.json")


@pytest.fixture(scope="module")
def forged(work, tmp_path_factory):
    """A folder of files as long as the artifact's: other weights, a config, another tokenizer."""
    folder = tmp_path_factory.mktemp("forged")
    weights = bytearray((work / "artifact" / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(weights[:8], "little")
    places = json.loads(weights[8:header])
    for name, place in places.items():
        if name.endswith("layernorm.weight") or name == "model.norm.weight":  # in bfloat16
            begin, end = (header + offset for offset in place["data_offsets"])
            weights[begin:end] = b"\x00\xc0\x80\x3f" * ((end - begin) // 4)  # -2, 1, -2, 1
    (folder / "model.safetensors").write_bytes(weights)
    config = (work / "artifact" / "config.json").read_text()
    assert '"rms_norm_eps": 1e-06' in config
    (folder / "config.json").write_text(config.replace("1e-06", "9e-01"))
    tokens = json.loads((work / "artifact" / "tokenizer.json").read_text())["model"]["vocab"]
    one, other = sorted(tokens, key=tokens.get)[40:42]
    words = (work / "artifact" / "tokenizer.json").read_text()
    swapped = words.replace(json.dumps(one) + ":", "@:").replace(
        json.dumps(other) + ":", json.dumps(one) + ":"
    )
    (folder / "tokenizer.json").write_text(swapped.replace("@:", json.dumps(other) + ":"))
    for name in RACED:
        mine, theirs = (folder / name).read_bytes(), (work / "artifact" / name).read_bytes()
        assert mine != theirs and len(mine) == len(theirs), name
    return folder


def said_by(loaded):
    """The loaded model's logits and the tokens of a text."""
    ids = loaded.tokenizer("ABCDEFGHIJ value")["input_ids"]
    loaded.decoder.begin(rows=1, capacity=16)
    return loaded.decoder.forward(torch.tensor([[5, 6, 7, 8]])).tolist(), ids, loaded.eos_token_ids


class Intruder:
    """A hook that changes files of a folder just before a chosen one of its opens and listings."""

    def __init__(self):
        self.folder, self.before, self.act, self.seen = "", 0, None, 0
        sys.addaudithook(self._hear)  # for the whole process: no hook can be taken away

    def _hear(self, event, arguments):
        if self.act is None or event not in ("open", "os.listdir", "os.scandir"):
            return
        if str(arguments[0]).startswith(self.folder):
            self.seen += 1
            if self.seen == self.before:
                act, self.act = self.act, None
                act()
                self.act = lambda: None  # goes on to count

    @contextmanager
    def at(self, folder, before, act):
        self.folder, self.before, self.act, self.seen = str(folder), before, act, 0
        try:
            yield
        finally:
            self.act = None


@pytest.fixture(scope="module")
def intruder():
    return Intruder()


def exchange(folder, forged, names):
    """Put forged files under their names, as os.replace does: at once."""
    for name in names:
        shutil.copy(forged / name, folder.with_name(f"{name}.new"))
        os.replace(folder.with_name(f"{name}.new"), folder / name)


def overwrite(folder, forged, names):
    """Write forged content into the files that are there."""
    for name in names:
        with (folder / name).open("r+b") as file:
            file.write((forged / name).read_bytes())


@pytest.mark.parametrize(
    ("change", "decoder"),
    [(exchange, "auto"), slow((overwrite, "auto")), slow((exchange, "transformers"))],
)
def test_what_is_changed_before_any_open_of_the_folder_never_runs(
    work, artifact, forged, tmp_path, intruder, change, decoder
):
    """For every n: the files are changed before the n-th open, or listing, of the folder.

    Mesh-LLM/mesh-llm#1708 hashed weights and let the engine open them by name once more;
    FinGuardName/FinBound#80 the same with an adapter and an ONNX file.
    """
    key = work / "mine.pub"
    true = said_by(load(artifact, decoder=decoder, require_signature=key))
    with intruder.at(artifact, 0, lambda: None):
        load(artifact, decoder=decoder, require_signature=key)
    opens = intruder.seen
    assert 5 < opens < 40  # a name is opened once, and its folder listed
    ran = 0
    for names in ([name] for name in RACED):
        for before in range(1, opens + 2):
            folder = tmp_path / f"{names[0]}-{before}" / artifact.name
            shutil.copytree(artifact, folder)
            for suffix in (".sig", ".intoto.json", ".cdx.json"):
                shutil.copy(artifact.with_name(artifact.name + suffix), folder.parent)
            act = functools.partial(change, folder, forged, names)
            with intruder.at(folder, before, act), suppress(IntegrityError):
                assert said_by(load(folder, decoder=decoder, require_signature=key)) == true
                ran += 1
            shutil.rmtree(folder.parent)
    assert ran >= len(RACED)  # what is changed after the last open changes nothing


def test_the_same_changes_run_where_a_name_is_checked_and_then_loaded(
    work, artifact, forged, tmp_path
):
    """What the test above would find: forged weights, config and tokens that are told apart."""
    true = said_by(load(artifact, decoder="auto"))
    for name in RACED:
        folder = Path(shutil.copytree(artifact, tmp_path / name))
        verify(folder)
        exchange(folder, forged, [name])
        assert said_by(load(folder, decoder="auto", verify=False)) != true


def test_weights_that_stay_on_disk_are_compared_at_every_token(work, artifact, forged, monkeypatch):
    from quantflow.runtime.offload import load_offloaded

    loaded = load_offloaded(artifact, require_signature=work / "mine.pub")
    true = said_by(loaded)
    exchange(artifact, forged, RACED)  # the files that were checked are open
    assert said_by(loaded) == true
    monkeypatch.setattr(sealed, "BLOCK", 1 << 12)  # less than the file
    again = Path(shutil.copytree(work / "artifact", artifact.with_name("again")))
    assert run("sign", again, "--key", work / "mine.pem") == 0
    loaded = load_offloaded(again, require_signature=work / "mine.pub")
    flat = bytes((again / "model.safetensors").stat().st_size)
    with (again / "model.safetensors").open("r+b") as file:
        file.write(flat)
    with pytest.raises(IntegrityError, match="not those that were hashed"):
        said_by(loaded)


def test_experts_that_stay_on_disk_are_compared_whenever_they_are_read(work, tmp_path, monkeypatch):
    from quantflow.runtime.offload import load_offloaded

    folder = tmp_path / "signed"
    source = write_model(tmp_path / "model", "mixtral")
    monkeypatch.setattr(sealed, "BLOCK", 1 << 12)  # less than the file
    assert run("quantize", source, "-o", tmp_path / "q", "--scheme", "W8A16") == 0
    assert run("export", tmp_path / "q", "-o", folder) == 0
    assert run("sign", folder, "--key", work / "mine.pem") == 0
    loaded = load_offloaded(folder, require_signature=work / "mine.pub")
    true = said_by(loaded)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    places = sorted(
        (header + begin, header + end, ".experts." in name)
        for name, place in json.loads(content[8:header]).items()
        if name != "__metadata__"
        for begin, end in [place["data_offsets"]]
    )
    # whole blocks between those of other tensors, which are read at every token
    edges = [0, *(edge for begin, end, routed in places if not routed for edge in (begin, end))]
    with weights.open("r+b") as file:
        for begin, end in zip(edges[::2], edges[1::2], strict=False):
            first, last = -(-max(begin, header) // 4096) * 4096, end // 4096 * 4096
            file.seek(first)
            file.write(bytes(max(0, last - first)))
    assert said_by(loaded) == true  # they are in memory
    loaded.experts._left = lambda held: 0
    with pytest.raises(IntegrityError, match="not those that were hashed"):
        said_by(loaded)


SWAPPING = """
import os, shutil, sys
folder, *names = sys.argv[1:]
print("ready", flush=True)
while True:  # the true file, the forged one, and the forged content inside of the true file
    for source in ("true", "forged"):
        for name in names:
            new = f"{folder}.{name}.new"
            shutil.copy(os.path.join(f"{folder}.{source}", name), new)
            os.replace(new, os.path.join(folder, name))
    for source in ("true", "forged"):
        for name in names:
            with open(os.path.join(folder, name), "r+b") as file:
                file.write(open(os.path.join(f"{folder}.{source}", name), "rb").read())
"""


def test_a_second_process_that_exchanges_files_all_the_time_never_gets_its_weights_run(
    work, artifact, forged
):
    true = said_by(load(artifact, decoder="auto", require_signature=work / "mine.pub"))
    for kind, source in (("true", artifact), ("forged", forged)):
        shutil.copytree(source, f"{artifact}.{kind}")
    command = [sys.executable, "-c", SWAPPING, str(artifact), *RACED]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as second:
        assert second.stdout.readline() == b"ready\n"
        outcomes = []
        try:
            while len(outcomes) < 20 or (None not in outcomes and len(outcomes) < 2000):
                try:
                    loaded = load(artifact, decoder="auto", require_signature=work / "mine.pub")
                    outcomes.append(said_by(loaded) == true)
                except (IntegrityError, InputError):  # a file is missing or half written
                    outcomes.append(None)
        finally:
            second.kill()
    assert False not in outcomes and None in outcomes


@pytest.mark.parametrize("change", [exchange, overwrite])
def test_what_is_changed_while_it_is_signed_is_not_what_the_signature_is_over(
    work, forged, tmp_path, intruder, change
):
    """A signer verifies and signs the same bytes: nobody gets others signed by changing them."""
    true = json.loads((work / "artifact" / "quantflow.json").read_text())["files"]
    signed = 0
    for before in range(1, 12):
        folder = Path(shutil.copytree(work / "artifact", tmp_path / str(before) / "artifact"))
        act = functools.partial(change, folder, forged, RACED)
        with intruder.at(folder, before, act), suppress(IntegrityError):
            sign(folder, Signer(key=work / "mine.pem"))
            bundle = json.loads(folder.with_name("artifact.sig").read_text())
            payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
            over = {one["name"]: one["digest"] for one in payload["predicate"]["resources"]}
            assert {name: over[name] for name in RACED} == {
                name: true[name]["sha256"] for name in RACED
            }
            signed += 1
    assert signed


def test_the_library_itself_verifies_the_signature(work, artifact):
    """The OpenSSF's own program, which reads the folder by itself."""
    (artifact / "README.md").write_text("a page that a hub shows")
    check = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=work / "mine.pub")
    check.verify(artifact, artifact.with_name("artifact.sig"))
    flipped(artifact / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        check.verify(artifact, artifact.with_name("artifact.sig"))


def test_the_bundle_that_was_read_is_the_one_that_is_checked(
    work, artifact, tmp_path, intruder, monkeypatch
):
    """A certificate that expired is not hidden by a bundle that is there for the first look."""
    folder = Path(shutil.copytree(work / "artifact", tmp_path / "certified" / "artifact"))
    root, certificate, key = certificates(tmp_path, "us", begin=-1, end=1)
    bundle = folder.with_name("artifact.sig")
    sign(folder, Signer(key=key, certificate=certificate, chain=(root,)))
    shutil.copy(artifact.with_name("artifact.sig"), bundle.with_suffix(".other"))
    for before in range(1, 4):
        act = functools.partial(shutil.copy, bundle.with_suffix(".other"), bundle)
        saved = bundle.read_bytes()
        with intruder.at(bundle, before, act):
            if before == 1:
                with pytest.raises(IntegrityError):
                    require_signature(folder, Trusted(roots=(root,)))
            else:
                require_signature(folder, Trusted(roots=(root,)))
        bundle.write_bytes(saved)


def test_vllm_gets_a_signed_artifact_that_nobody_else_may_write_to(work, artifact):
    """vLLM opens the files by name once more, after their signature was checked."""
    job = ServeJob(
        artifact=artifact, engine="vllm", signature=RequiredSignature(key=work / "mine.pub")
    )
    assert vllm.command_of(job)[:2] == ["vllm", "serve"]
    for place in (artifact, artifact / "model.safetensors"):
        was = place.stat().st_mode
        place.chmod(0o777)
        with pytest.raises(InputError, match=f"{place.name}: others may write to it, and vLLM"):
            vllm.command_of(job)
        place.chmod(was)
