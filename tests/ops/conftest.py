"""The backends that the op tests run on.

``pytest tests/ops`` runs each test on the CPU implementation and, where there is a GPU (marker ``gpu``), on the Triton
kernels. With ``TRITON_INTERPRET=1`` in the environment, which Triton reads when it is imported, the same tests run the
kernels' launchers on CPU tensors under Triton's interpreter, on smaller shapes; tests of other things are left out.
``test_interpreter.py`` starts that second process, so that a plain run covers both.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ops_harness import BACKENDS, INTERPRETING, Backend

_NAMES = ["interpreter"] if INTERPRETING else ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=_NAMES)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return BACKENDS[request.param]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that an op leaves unwritten reads as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter walks a whole tile of the convolution for every segment, so give it the shortest that works."""
    if INTERPRETING:
        from ckpt_ops import launch_conv

        monkeypatch.setattr(launch_conv, "TILE", 8)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; skipped without one")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not INTERPRETING:
        return
    kept = [item for item in items if "backend" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
