"""The seconds that a comparison promises: those of one window, by hand."""

from itertools import count

import pytest
import torch

from quantflow.core.device import HOST
from quantflow.models.capture import LayerStream
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.progress import SILENT
from quantflow.validating import layerwise
from quantflow.validating.layerwise import BASELINE, Comparing


@pytest.mark.parametrize(
    ("kept", "workers", "expected"),
    [
        # of each model: 2 layers read, 2 run and a head read and run; scores once
        ((), 1, 2 * (2 + 1) + 3 * (2 * (2 + 1) + 1)),
        ((), 2, 2 * (2 + 1) + 3 * (2 * (2 + 1) + 1) / 2),
        # the layers of one model are known
        ((BASELINE,), 1, (2 + 1 + 1) + 3 * (2 + 1 + 1 + 1)),
    ],
)
def test_layers_heads_and_scores_of_all_windows_are_in_the_seconds(
    llama, tmp_path, monkeypatch, kept, workers, expected
):
    source = open_source(llama)
    streams = {
        name: LayerStream(source, graph_for(source.config), dtype=torch.float32, device=HOST)
        for name in (BASELINE, "candidate")
    }
    comparing = Comparing(
        streams=streams,
        # three times the tokens of the longest
        sequences=[torch.arange(length) for length in (8, 12, 10, 6)],
        folder=tmp_path,
        keys=dict.fromkeys(streams, "k"),
        stage="t",
        progress=SILENT,
        workers=workers,
    )
    clock = count()
    monkeypatch.setattr(layerwise.time, "perf_counter", lambda: next(clock))
    assert comparing.seconds(kept=kept) == expected
    assert not list(tmp_path.iterdir())
