"""Other projects' kernels, each used where it is installed and checked against fp64 like every arm."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection

import torch

from benchmarks.arms import Arm
from benchmarks.loads import Shape
from benchmarks.peers_flashinfer import FlashInferInFull, FlashInferSplit, FlashInferTwoCalls
from benchmarks.peers_packed import FlaInFull, FlaOneByOne, FlashQlaInFull, FlashQlaTwoCalls, FlaTwoCalls

PEERS: dict[str, tuple[type[Arm], ...]] = {
    "fla": (FlaInFull, FlaOneByOne, FlaTwoCalls),
    "flashinfer": (FlashInferInFull, FlashInferTwoCalls, FlashInferSplit),
    "flash_qla": (FlashQlaInFull, FlashQlaTwoCalls),
}
"""The arms of each package, by the name under which it is imported."""


def peer_arms(shape: Shape, device: torch.device, packages: Collection[str] = tuple(PEERS)) -> tuple[type[Arm], ...]:
    """Arms that can run ``shape`` here: on a GPU, of installed packages, for the bare delta rule in half precision."""
    if device.type != "cuda" or shape.conv_width:
        return ()
    installed = [name for name in PEERS if name in packages and importlib.util.find_spec(name) is not None]
    if torch.cuda.get_device_capability(device) != (9, 0):
        installed = [name for name in installed if name == "fla"]  # the others' paths here are Hopper's
    return tuple(arm for name in installed for arm in PEERS[name])
