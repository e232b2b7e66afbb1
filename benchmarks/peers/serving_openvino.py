"""OpenVINO GenAI's continuous batching behind HTTP, for serving.py.

    --program "OpenVINO=PYTHON benchmarks/peers/serving_openvino.py FOLDER {port} THREADS"

Needs openvino-genai, and a folder that optimum-intel exported. It answers `/v1/models` and streams
`/v1/completions` greedily: a token per event, as many tokens as the request asks for. A prompt that
begins like an earlier one reuses its blocks.
"""

import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import openvino_genai as genai

CACHE = 2  # GB, for keys and values


class Batch:
    """The pipeline, and a thread that steps it while a request is unfinished."""

    def __init__(self, folder: Path, threads: int) -> None:
        """Load the model."""
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = (
            CACHE,
            True,
            True,
        )
        properties = {"INFERENCE_NUM_THREADS": threads}
        self.pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self.tokenizer = self.pipeline.get_tokenizer()
        self.numbers, self.new = count(), queue.Queue[tuple[str, int, queue.Queue[int | None]]]()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        """Step, and hand each token to the queue of its request; None ends it."""
        running: list[tuple[Any, queue.Queue[int | None], int]] = []
        while True:
            while not running or not self.new.empty():
                prompt, new, told = self.new.get()
                chosen = genai.GenerationConfig(
                    max_new_tokens=new, min_new_tokens=new, do_sample=False, ignore_eos=True
                )
                running.append(
                    (self.pipeline.add_request(next(self.numbers), prompt, chosen), told, new)
                )
            self.pipeline.step()
            left = []
            for handle, told, missing in running:
                outputs = handle.read().values() if handle.can_read() else ()
                tokens = [token for output in outputs for token in output.generated_ids]
                for token in tokens:
                    told.put(token)
                if missing > len(tokens):
                    left.append((handle, told, missing - len(tokens)))
                else:
                    told.put(None)
            running = left


class Handler(BaseHTTPRequestHandler):
    """The two routes."""

    batch: Batch

    def do_GET(self) -> None:
        """Tell the model."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "openvino"}]}).encode())

    def do_POST(self) -> None:
        """Stream a completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        told = queue.Queue[int | None]()
        self.batch.new.put((body["prompt"], body["max_tokens"], told))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        while (token := told.get()) is not None:
            event = {"choices": [{"index": 0, "text": self.batch.tokenizer.decode([token])}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_words: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    Handler.batch = Batch(Path(sys.argv[1]), int(sys.argv[3]))
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
