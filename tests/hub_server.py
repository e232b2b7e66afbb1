"""A server of the hub's shape on this machine: repositories are folders, uploads change them."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
from huggingface_hub import constants

COMMIT, OLDER = "a" * 40, "b" * 40
TOKEN = "hf_" + "secret" * 5
LARGE = 2000  # bytes from which a file is uploaded beside the commit


class Hub(ThreadingHTTPServer):
    """Repositories as folders: org/name -> (folder, private).

    Attributes:
        repositories: the repositories.
        asked: method and path of each request.
        tokens: what requests had as Authorization.
        served: bytes of files that were sent, by name of the file.
        branches: branches beside main that were made: (org/name, branch) -> folder.
        stored: contents that were uploaded beside a commit, by sha256.
        commits: summary of each commit, and names of what it added and removed.
        cards: metadata of a repository's card.
        refuse: status, by beginning of the path of a POST or PUT; each counts down `failures`.
        failures: how many requests `refuse` still refuses.
        knows_ranges: whether `Range` is heeded.
        recorded: sha256 that is told of a large file in place of its own.
        room: folder of repositories that are created.
    """

    def __init__(self, repositories: dict[str, tuple[Path, bool]], room: Path | None = None):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repositories, self.room = repositories, room
        self.asked: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.served: dict[str, int] = {}
        self.branches: dict[tuple[str, str], Path] = {}
        self.stored: dict[str, bytes] = {}
        self.commits: list[tuple[str, list[str], list[str]]] = []
        self.cards: dict[str, dict[str, Any]] = {}
        self.refuse: dict[str, int] = {}
        self.failures = 0
        self.recorded: dict[str, str] = {}
        self.knows_ranges = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def uploads(self) -> int:
        """How many contents were sent beside a commit."""
        return sum(path.startswith("/lfs/") for method, path in self.asked if method == "PUT")


@contextmanager
def serving(server: Hub, patch: pytest.MonkeyPatch, *, cache: Path) -> Iterator[Hub]:
    """The server as huggingface_hub's hub in this process, with a cache of its own."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    patch.setattr(constants, "ENDPOINT", server.address)
    patch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        server.address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def files_of(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class _Answers(BaseHTTPRequestHandler):
    """The hub's API as far as downloads and uploads need it."""

    server: Hub

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self._parts()
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        folder = self._folder(name)
        if folder is None:
            return
        revision = (parts[5] if len(parts) > 5 else "main") if api else parts[3]
        commit = {"main": COMMIT, COMMIT: COMMIT, "v1": OLDER, OLDER: OLDER}.get(revision)
        if (branch := self.server.branches.get((name, revision))) is not None:
            folder, commit = branch, OLDER
        if commit is None:
            return self._say(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = files_of(folder)
        if api and len(parts) > 4 and parts[4] == "tree":
            return self._json([self._row(file, path) for file, path in files.items()])
        if api:
            rows = [self._sibling(file, path) for file, path in files.items()]
            about = {"id": name, "modelId": name, "sha": commit, "siblings": rows}
            about["private"] = self.server.repositories[name][1]
            return self._json({**about, "cardData": self.server.cards.get(name, {})})
        file = "/".join(parts[4:])
        if file not in files:
            return self._say(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        data = files[file].read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
        self._content(file, data, headers)

    def do_POST(self) -> None:
        parts, body = self._parts(), self._body()
        if self._refused():
            return
        if parts == ["api", "validate-yaml"]:
            return self._json({"errors": [], "warnings": []})
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            folder = self.server.room / name
            folder.mkdir(parents=True)
            (folder / ".gitattributes").write_text("")
            self.server.repositories[name] = (folder, asked.get("visibility") == "private")
            return self._json({"url": f"{self.server.address}/{name}"})
        if parts[-3:] == ["lfs", "objects", "batch"]:
            return self._json(
                {"objects": [self._wanted(one) for one in json.loads(body)["objects"]]}
            )
        name, verb, revision = "/".join(parts[2:4]), parts[4], unquote(parts[5])
        folder = self.server.branches.get((name, revision)) or self._folder(name)
        if folder is None:
            return
        if verb == "branch":
            made = self.server.room / "branches" / name / revision
            made.mkdir(parents=True)
            self.server.branches[name, revision] = made
            return self._json({})
        if verb == "preupload":
            return self._json(
                {"files": [self._mode(folder, one) for one in json.loads(body)["files"]]}
            )
        self._commit(name, folder, [json.loads(line) for line in body.splitlines()])

    def do_PUT(self) -> None:
        body = self._body()
        self._parts()
        if self._refused():
            return
        self.server.stored[hashlib.sha256(body).hexdigest()] = body
        self._json({})

    def _parts(self) -> list[str]:
        self.server.asked.append((self.command, self.path))
        self.server.tokens.add(self.headers.get("Authorization"))
        return urlparse(self.path).path.strip("/").split("/")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _folder(self, name: str) -> Path | None:
        """The folder of a repository; None after the answer that it is not for this token."""
        folder, private = self.server.repositories.get(name, (None, False))
        if folder is None or (private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            missing = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self._say(401, b"{}", missing)
            return None
        return folder

    def _refused(self) -> bool:
        for beginning, status in self.server.refuse.items():
            if self.path.startswith(beginning) and self.server.failures > 0:
                self.server.failures -= 1
                self._say(status, b"{}", {})
                return True
        return False

    def _sibling(self, file: str, path: Path) -> dict[str, Any]:
        """A file as model info lists it; of a large one with its hash."""
        size = path.stat().st_size
        known = self.server.recorded.get(file) or hashlib.sha256(path.read_bytes()).hexdigest()
        large = {"lfs": {"sha256": known, "size": size, "pointerSize": 130}}
        return {"rfilename": file, "size": size, **(large if size > LARGE else {})}

    def _row(self, file: str, path: Path) -> dict[str, Any]:
        return {"type": "file", "path": file, "size": path.stat().st_size, "oid": "0" * 40}

    def _mode(self, folder: Path, one: dict[str, Any]) -> dict[str, Any]:
        mode = {"uploadMode": "lfs" if one["size"] > LARGE else "regular", "shouldIgnore": False}
        path = folder / one["path"]
        there = path.is_file() and mode["uploadMode"] == "lfs"
        oid = {"oid": hashlib.sha256(path.read_bytes()).hexdigest()} if there else {}
        return {"path": one["path"], **mode, **oid}

    def _wanted(self, one: dict[str, Any]) -> dict[str, Any]:
        there = one["oid"] in self.server.stored
        upload = {"upload": {"href": f"{self.server.address}/lfs/{one['oid']}"}}
        return {**one, **({} if there else {"actions": upload})}

    def _commit(self, name: str, folder: Path, lines: list[dict[str, Any]]) -> None:
        added, removed = [], []
        for line in lines[1:]:
            value, path = line["value"], folder / line["value"]["path"]
            if line["key"] == "deletedFile":
                path.unlink()
                removed.append(value["path"])
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            inline = line["key"] == "file"
            path.write_bytes(
                base64.b64decode(value["content"]) if inline else self.server.stored[value["oid"]]
            )
            added.append(value["path"])
        self.server.commits.append((lines[0]["value"]["summary"], added, removed))
        oid = f"{len(self.server.commits):040x}"
        url = f"{self.server.address}/{name}/commit/{oid}"
        self._json({"commitUrl": url, "commitOid": oid})

    def _content(self, file: str, data: bytes, headers: dict[str, str]) -> None:
        """A file, or the bytes of it that `Range` asks for."""
        status, asked = 200, self.headers.get("Range")
        if asked is not None and self.server.knows_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            end = min(int(last), len(data) - 1) if last else len(data) - 1
            headers["Content-Range"] = f"bytes {int(first)}-{end}/{len(data)}"
            status, data = 206, data[int(first) : end + 1]
        if self.command != "HEAD":
            self.server.served[file] = self.server.served.get(file, 0) + len(data)
        self._say(status, data, headers)

    def _json(self, value: Any) -> None:
        self._say(200, json.dumps(value).encode(), {})

    def _say(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        length = {"Content-Length": str(len(data)), "Content-Type": "application/json"}
        for key, value in {**length, **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
