"""Settings of one patched model."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import CheckpointValueError

_STATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What a patched model may keep and how large one step may be.

    Args:
        cache_bytes: bytes that checkpoints may occupy between calls (states, keys and values, and the logits of
            checkpoints at the end of a prompt). ``None`` allows a tenth of the GPU's memory,
            or 1 GiB on a CPU.
        cache_slots: number of checkpoints that may be kept between calls; ``None`` leaves it to ``cache_bytes``.
            Both limits hold when both are given. Zero keeps nothing between calls; prompts of one call still share.
        max_batch_tokens: prompt tokens that one packed forward may carry. Longer prompts run in several forwards.
        max_running: requests of an engine that hold a state of their own at once; None sets no limit. The rows of a
            ``generate`` call advance together and come on top.
        memory_bytes: bytes that requests and checkpoints may occupy together; None leaves it to the device. Where
            they are short, requests wait, and running ones are computed again later.
        state_dtype: dtype of the stored recurrent states. One rounding of a state to bfloat16 moves the logits of a
            bfloat16 model by about as much as a whole extra layer of rounding, so float32 is the default.
        decode_graphs: on a GPU, replay decode steps as CUDA graphs, one for each of some batch sizes. Python code of
            the model, forward hooks among it, runs when a graph is recorded and not when it is replayed.
        verify: compare a packed forward of a few tokens with the unpatched model when patching.

    Raises:
        CheckpointValueError: a value is out of range.
    """

    cache_bytes: int | None = None
    cache_slots: int | None = None
    max_batch_tokens: int = 16384
    max_running: int | None = 256
    memory_bytes: int | None = None
    state_dtype: str = "float32"
    decode_graphs: bool = True
    verify: bool = True

    def __post_init__(self) -> None:
        for name in ("cache_bytes", "cache_slots"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise CheckpointValueError(f"{name} must be None or an int >= 0, got {value!r}")
        for name in ("max_running", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise CheckpointValueError(f"{name} must be None or an int >= 1, got {value!r}")
        tokens = self.max_batch_tokens
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise CheckpointValueError(f"max_batch_tokens must be an int >= 1, got {tokens!r}")
        for name in ("decode_graphs", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise CheckpointValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.state_dtype not in _STATE_DTYPES:
            raise CheckpointValueError(f"state_dtype must be one of {_STATE_DTYPES}, got {self.state_dtype!r}")
