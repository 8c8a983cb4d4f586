"""What all tests share: the ``gpu`` marker's skip, and Hypothesis without deadlines (the machines are shared)."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("project", deadline=None, print_blob=True)
settings.load_profile("project")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` when there is no CUDA device; torch is only asked when there are such tests."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
