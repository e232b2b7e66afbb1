"""A fork server: it imports everything once.

Each case is a fork that runs one command line with one fault.

Run as a program with the path of a Unix socket. A connection sends one JSON request and gets one
JSON answer:

    request   {"arguments": [...], "root": folder, "faults": {...}, "kill_after": seconds or null}
    answer    {"code": 0..7, 130, 143 or minus the signal that ended it, "stdout", "stderr",
               "seconds", "counts": {kind: calls}, "written": bytes,
               "alien": [files opened for writing by other means],
               "allocations": blocks that torch asked for}

The faults are described at `Faults`. Only calls on files below `root` count, its log and its locks
left out.
"""

import contextlib
import ctypes
import errno
import importlib
import io
import itertools
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

TIMEOUT = 120.0  # seconds; a case that takes longer hangs
KINDS = {
    "open": "open",
    "mkdir": "open",
    "write": "write",
    "pwrite": "write",
    "fsync": "fsync",
    "fdatasync": "fsync",
    "ftruncate": "write",
    "rename": "rename",
    "replace": "rename",
    "link": "rename",
    "unlink": "unlink",
    "remove": "unlink",
    "rmdir": "unlink",
    "pread": "read",
    "preadv": "read",
}
SIGNALS = {
    "KILL": [signal.SIGKILL],
    "TERM": [signal.SIGTERM],
    "INT": [signal.SIGINT],
    "INT+TERM": [signal.SIGINT, signal.SIGTERM],
}
SKIPPED = (".lock", ".log")


class Faults:
    """Stand-ins for the calls of `os` that change the disk.

    `spec` may hold, all optional:
        kind, at, do     the `at`-th call of a kind fails with the errno named `do`, or is preceded
                         by KILL, TERM, INT, INT+TERM (a second signal), or VANISH; kinds are open
                         for writing and mkdir; write and pwrite; fsync; rename and link; unlink and
                         rmdir; pread and preadv of a file of the source
        source           the folder of the model: only reads below it count
        path             what VANISH removes: a file of the source
        full             bytes after which every write ends short, and then with ENOSPC, as does
                         making anything new
        log              the errno named so for every write of a log file
        since            from the `at`-th of all calls that change the disk on, each fails with the
                         errno named `do`: a file system that turned read-only
        limits           {"NOFILE", "AS": how much more than the process has now; "FSIZE": bytes of
                         a file}
        plain            be a user whom permissions of files bind, although this may be root
        clock            seconds that the clock jumps, ahead and back in turn, each time that it is
                         read
        zone             the time zone, as TZ names it
        slow             seconds that every fsync takes, as on a file system far away
        allocation       number of the block of torch that is refused (allocations.c, preloaded)
    """

    def __init__(self, root: Path, spec: dict) -> None:
        self.root, self.source, self.spec = f"{root}/", f"{spec.get('source', root)}/", spec
        self.counts = dict.fromkeys(sorted(set(KINDS.values())), 0)
        self.written = self.changes = 0
        # opened for writing by something that does not go through these calls
        self.alien: list[str] = []
        self.active = True
        self._inside = threading.local()
        self._lock = threading.Lock()

    def install(self) -> None:
        for name in KINDS:
            if hasattr(os, name):
                setattr(os, name, self._wrapped(name, getattr(os, name)))
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple) -> None:
        if event != "open" or not self.active or getattr(self._inside, "depth", 0):
            return
        path, mode, flags = arguments
        writes = (
            any(c in mode for c in "wax+")
            if isinstance(mode, str)
            else (flags or 0) & (os.O_WRONLY | os.O_RDWR)
        )
        if writes and isinstance(path, str) and self._counts(os.path.abspath(path)):
            self.alien.append(path)

    def _counts(self, path: str) -> bool:
        return path.startswith(self.root) and not path.endswith(SKIPPED)

    def _path(self, name: str, arguments: tuple, keywords: dict) -> str:
        first = arguments[0]
        if isinstance(first, int):
            return os.readlink(f"/proc/self/fd/{first}")
        folder = (
            keywords.get("dir_fd")
            if name not in ("rename", "replace", "link")
            else keywords.get("src_dir_fd")
        )
        text = os.fspath(arguments[1] if name == "link" else first)
        return os.path.join(
            os.getcwd() if folder is None else os.readlink(f"/proc/self/fd/{folder}"), text
        )

    def _wrapped(self, name: str, call):
        kind = KINDS[name]

        def stand_in(*arguments, **keywords):
            opens = name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            path = "" if opens or not self.active else self._path(name, arguments, keywords)
            if path.endswith(".log") and "log" in self.spec and kind == "write":
                raise OSError(
                    getattr(errno, self.spec["log"]), os.strerror(getattr(errno, self.spec["log"]))
                )
            counts = path.startswith(self.source) if kind == "read" else self._counts(path)
            if not counts:
                return self._call(call, arguments, keywords)
            with self._lock:
                self.counts[kind] += 1
                due = kind == self.spec.get("kind") and self.counts[kind] == self.spec["at"]
            if due:
                self._strike(name, arguments)
            if self.spec.get("since") and kind != "read":
                with self._lock:
                    self.changes += 1
                if self.changes >= self.spec["at"]:
                    self._fail(self.spec["do"], arguments)
            full = self.spec.get("full")
            if full is not None and name in ("write", "pwrite"):
                arguments = (
                    arguments[0],
                    memoryview(arguments[1])[: max(0, full - self.written)],
                    *arguments[2:],
                )
            if full is not None and self.written >= full and (kind == "write" or kind == "open"):
                self._fail("ENOSPC", arguments)
            if kind == "fsync":
                time.sleep(self.spec.get("slow", 0.0))
            result = self._call(call, arguments, keywords)
            if name in ("write", "pwrite"):
                with self._lock:
                    self.written += result
            return result

        return stand_in

    def _call(self, call, arguments: tuple, keywords: dict):
        self._inside.depth = getattr(self._inside, "depth", 0) + 1
        try:
            return call(*arguments, **keywords)
        finally:
            self._inside.depth -= 1

    def _strike(self, name: str, arguments: tuple) -> None:
        do = self.spec["do"]
        if do in SIGNALS:
            for number in SIGNALS[do]:
                os.kill(os.getpid(), number)
        elif do == "VANISH":
            os.rename(self.spec["path"], f"{self.spec['path']}.gone")
        else:
            self._fail(do, arguments)

    def _fail(self, number: str, arguments: tuple) -> None:
        """Raise the system's error.

        A call on a path names it; one on a descriptor or beside one does not name all of it.
        """
        code = getattr(errno, number)
        named = () if isinstance(arguments[0], int) else (os.fspath(arguments[0]),)
        raise OSError(code, os.strerror(code), *named)


def limit(spec: dict) -> None:
    """Set this process's limits, permissions, clock and allocator by a description of faults."""
    if "clock" in spec:
        jumps, real = itertools.cycle((spec["clock"], -spec["clock"])), (time.time, time.time_ns)
        time.time = lambda: real[0]() + next(jumps)
        time.time_ns = lambda: real[1]() + next(jumps) * 1_000_000_000
    if "zone" in spec:
        os.environ["TZ"] = spec["zone"]
        time.tzset()
    if spec.get("plain"):
        drop_override()
    if allocator() is not None:
        allocator().refuse_allocation(spec.get("allocation", 0))
    for name, more in spec.get("limits", {}).items():
        before = 0
        if name == "AS":
            before = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf(
                "SC_PAGE_SIZE"
            )
        elif name == "NOFILE":
            before = 1 + max(int(number) for number in os.listdir("/proc/self/fd"))
        kind = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(kind, (before + more, resource.getrlimit(kind)[1]))


def allocator() -> ctypes.CDLL | None:
    """Return this process's own symbols where allocations.c is among them."""
    process = ctypes.CDLL(None)
    return process if hasattr(process, "refuse_allocation") else None


def unlimit(spec: dict) -> None:
    """Take the limits away again."""
    for name in spec.get("limits", {}):
        kind = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(kind, (resource.getrlimit(kind)[1],) * 2)


def drop_override() -> None:
    """Give up what lets root read and write any file; its own files then bind it by their modes."""
    if os.geteuid() != 0:
        return
    call, header = ctypes.CDLL(None, use_errno=True).syscall, struct.pack("=Ii", 0x20080522, 0)
    data = ctypes.create_string_buffer(24)
    get, put = (125, 126) if os.uname().machine == "x86_64" else (90, 91)
    if call(get, header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    words = list(struct.unpack("=6I", data.raw))
    for place in (0, 1):  # effective, permitted
        words[place] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if call(put, header, struct.pack("=6I", *words)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def forked_proof(faults: Faults):
    """A `subprocess.Popen` that proves an export in a fork.

    A process would import torch again.
    """
    original = subprocess.Popen

    class Proof:
        """What export uses of the process; it does nothing until it is told what to prove."""

        returncode = None

        def __init__(self) -> None:
            self.stdin = io.StringIO()  # takes what proof is expected

        def communicate(self, order: str = "") -> tuple[str, str]:
            from quantflow.exporting import proof_process

            with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
                child = os.fork()
                if child == 0:
                    faults.active = False
                    os.dup2(stdout.fileno(), 1)
                    os.dup2(stderr.fileno(), 2)
                    end(lambda: proof_process.main(order))
                _, status = os.waitpid(child, 0)
                stdout.seek(0)
                stderr.seek(0)
                self.returncode = os.waitstatus_to_exitcode(status)
                return stdout.read(), stderr.read()

        def kill(self) -> None:
            """Do nothing: there is no process yet."""

    def popen(command, **options):
        return (
            Proof()
            if command[:4] == [sys.executable, "-P", "-m", "quantflow.exporting.proof_process"]
            else original(command, **options)
        )

    return popen


def end(main, finish=lambda: None) -> None:
    """End this process as Python does at the end of a program.

    What the server owns is not cleaned up.
    """
    code = 1
    try:
        code = main()
    except BaseException:  # a fork must never return into the server
        import traceback

        traceback.print_exc()
    finally:
        finish()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def case(request: dict, streams: list[io.IOBase], results: int) -> None:
    """Run one command line in this process, which ends with it."""
    from quantflow.stages.cli import cli
    from quantflow.stages.cli.output import exit_code

    os.setsid()
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
    faults = Faults(Path(request["root"]), request["faults"])
    subprocess.Popen = forked_proof(faults)
    faults.install()

    def finish() -> None:
        unlimit(request["faults"])
        faults.active = False
        blocks = 0 if allocator() is None else allocator().allocations()
        told = {
            "counts": faults.counts,
            "written": faults.written,
            "alien": faults.alien,
            "allocations": blocks,
        }
        with os.fdopen(results, "w") as pipe:
            json.dump(told, pipe)

    limit(request["faults"])
    end(lambda: exit_code(cli, request["arguments"]), finish)


def answer(request: dict) -> dict:
    """Fork a case, wait for it, kill it when asked to, and tell how it ended."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        reader, writer = os.pipe()
        begin = time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(reader)
            case(request, [stdout, stderr], writer)
        os.close(writer)
        limit = request["kill_after"]
        status = wait(child, begin + (TIMEOUT if limit is None else limit))
        seconds = time.monotonic() - begin
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # a proof that the killed process had begun
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        stdout.seek(0)
        stderr.seek(0)
        told = (
            json.loads(text)
            if text
            else {"counts": {}, "written": 0, "alien": [], "allocations": 0}
        )
        ended = {"code": os.waitstatus_to_exitcode(status), "seconds": seconds}
        return {**ended, **told, "stdout": stdout.read(), "stderr": stderr.read()}


def wait(child: int, until: float) -> int:
    """Return how a process ended; kill it at a moment."""
    pause = 0.001
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        if time.monotonic() >= until:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def warm_up() -> None:
    """Import what the verbs import when they are called; start no thread."""
    import torch

    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: F401

    for name in (
        "measuring.measure",
        "quantizing.quantize",
        "quantizing.layer_by_layer",
        "unifying.unify",
        "exporting.export",
        "exporting.proof_process",
        "validating.validate",
        "runtime.generation",
        "stages.run",
    ):
        importlib.import_module(f"quantflow.{name}")

    with torch.device("meta"):
        AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1))


def main() -> None:
    from quantflow.distributed.launch import die_with_parent

    die_with_parent()  # tests that are killed leave no server
    # cases are interrupted although tests may run in a background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warm_up()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(sys.argv[1])
        server.listen(16)
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            while True:  # collect handlers that have ended
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(-1, os.WNOHANG)[0]:
                        continue
                break
            if os.fork() == 0:
                server.close()
                with connection, connection.makefile("rw") as stream:
                    request = json.loads(stream.readline())
                    stream.write(json.dumps(answer(request)) + "\n")
                    stream.flush()
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main()
