"""Why Intel's extension does not run; what it computes is in tests/parity/test_ipex.py."""

from importlib.metadata import PackageNotFoundError

import pytest
import torch

from quantflow.backends import choose, ipex
from quantflow.backends.backend import Case
from quantflow.core.scheme import preset
from quantflow.errors import UsageError

CASE = Case(
    scheme=preset("W4A16"), device=torch.device("cpu"), shape=(64, 256), dtype=torch.float32
)


@pytest.fixture
def installed(monkeypatch):
    """Return what says which release is installed, and which packages are imported then."""

    def say(release, *, importing=lambda name: None):
        monkeypatch.setattr(ipex, "version", lambda name: release)
        monkeypatch.setattr(ipex, "import_module", importing)

    return say


def test_without_the_package_it_says_so(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(ipex, "version", missing)
    with pytest.raises(
        UsageError,
        match="ipex needs the package intel-extension-for-pytorch, which is not installed",
    ):
        choose(CASE, backend="ipex")


def test_beside_another_torch_it_is_not_imported(installed):
    def ends_the_process(name):
        raise AssertionError("imported")

    installed("2.8.0", importing=ends_the_process)
    words = (
        "ipex needs torch 2.8, which intel-extension-for-pytorch 2.8.0 was compiled for, "
        f"not {torch.__version__}"
    )
    assert ipex.BACKEND.why_not(CASE) == words


def test_a_package_that_does_not_load_says_why(installed):
    def broken(name):
        raise ImportError(f"{name}: libx.so is missing")

    installed(torch.__version__, importing=broken)
    assert "importing it failed: intel_extension_for_pytorch: libx.so is missing" in str(
        ipex.BACKEND.why_not(CASE)
    )


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("W4A16", None),
        ("W4A16_ASYM", None),
        ("W8A16", "ipex needs int4 weights, scheme W8A16 has int8 per channel"),
        ("W4A8", "ipex needs inputs in the model's dtype, scheme W4A8 has int8 per token"),
    ],
)
def test_beside_its_own_torch_it_takes_int4_weights(installed, scheme, reason):
    installed(torch.__version__)
    case = Case(scheme=preset(scheme), device=CASE.device, shape=CASE.shape, dtype=CASE.dtype)
    assert ipex.BACKEND.why_not(case) == reason
