"""Chooses the next token of many requests at once, each by its own settings and its own random numbers.

Requests with common settings are one batch on the device; one with processors or criteria of its own is a batch of one,
as if transformers generated for it alone. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from .errors import CheckpointValueError
from .recovery import is_device_failure
from .request_settings import RequestSettings

_ROOM = 512
"""Tokens that an answer has room for at first; the room doubles when it is full."""


class TokenChooser:
    """One request's part in sampling.

    Args:
        settings: how to choose.
        prompt: ids that the processors see before the answer.
        seed: of this request's random numbers; None for greedy search.
        device: of the model.
    """

    def __init__(self, settings: RequestSettings, prompt: Sequence[int], seed: int | None, device: torch.device):
        self.settings = settings
        self.generator: torch.Generator | None = None
        if settings.do_sample and seed is not None:
            self.generator = torch.Generator(device).manual_seed(seed)
        self._ids: Tensor | None = None
        self._length = len(prompt)
        if settings.group is None:
            # Written in place, so that no step copies the tokens before; a processor may keep a view of what it saw.
            room = min(settings.max_length, len(prompt) + _ROOM)
            self._ids = torch.empty((1, room), dtype=torch.long, device=device)
            self._ids[0, : len(prompt)] = torch.tensor(list(prompt), device=device)

    @property
    def ids(self) -> Tensor:
        """Tokens so far ``[1, L]``."""
        assert self._ids is not None
        return self._ids[:, : self._length]

    def append(self, token: Tensor) -> None:
        """Note the token ``[1]`` that was chosen, without reading it."""
        assert self._ids is not None
        if self._length == self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.empty_like(self._ids)], dim=1)
        self._ids[:, self._length] = token
        self._length += 1

    def may_go_on(self, length: int) -> bool:
        """Whether another token may follow the ``length``-th of prompt and answer, whatever that one is."""
        return length < self.settings.max_length

    def ends(self, token: int, length: int) -> str | None:
        """Why an answer ends with ``token``, the ``length``-th of prompt and answer, by the settings that all share."""
        if token in self.settings.eos:
            return "eos"
        return "length" if length >= self.settings.max_length else None


@dataclass(slots=True)
class Choice:
    """Tokens that were chosen, still on the device.

    Attributes:
        rows: which of the given rows have a token, in the order of ``tokens``.
        tokens: int64 ``[len(rows)]``.
        stops: for requests with criteria of their own, whether they stop: bool ``[1]`` by row.
        errors: what a row's processor or criterion raised.
    """

    rows: list[int] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    stops: dict[int, Tensor] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)

    def read(self) -> tuple[dict[int, int], dict[int, bool]]:
        """Tokens and verdicts by row, in one copy from the device: the only wait of a step."""
        if not self.rows:
            return {}, {}
        verdicts = [stop.to(torch.long).reshape(1) for stop in self.stops.values()]
        values = torch.cat([*self.tokens, *verdicts]).tolist()
        stops = dict(zip(self.stops, map(bool, values[len(self.rows) :]), strict=True))
        return dict(zip(self.rows, values[: len(self.rows)], strict=True)), stops


def choose_tokens(choosers: Sequence[TokenChooser], logits: Sequence[Tensor]) -> Choice:
    """Choose a token for each request from its logits ``[V]``."""
    groups: dict[object, list[int]] = {}
    choice = Choice()
    for row, chooser in enumerate(choosers):
        if chooser.settings.group is not None:
            groups.setdefault(chooser.settings.group, []).append(row)
        else:
            _choose_alone(choice, row, chooser, logits[row])
    for rows in groups.values():
        scores = torch.stack([logits[row] for row in rows]).to(torch.float32)
        settings = choosers[rows[0]].settings
        scores = settings.processors(cast(Any, None), cast(Any, scores))
        choice.tokens.append(_pick(scores, [choosers[row] for row in rows]))
        choice.rows.extend(rows)
    return choice


def _choose_alone(choice: Choice, row: int, chooser: TokenChooser, logits: Tensor) -> None:
    try:
        scores = logits[None].to(torch.float32, copy=True)
        scores = chooser.settings.processors(cast(Any, chooser.ids), cast(Any, scores))
        _check_shape("logits_processor", scores, (1, logits.shape[0]))
        token = _pick(scores, [chooser])
        chooser.append(token)
        if chooser.settings.criteria is not None:
            stop = chooser.settings.criteria(cast(Any, chooser.ids), cast(Any, None))
            _check_shape("stopping_criteria", stop, (1,))
            choice.stops[row] = stop
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or is_device_failure(error):
            raise
        choice.errors[row] = error
        choice.stops.pop(row, None)
        return
    choice.rows.append(row)
    choice.tokens.append(token)


def _check_shape(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """A wrong shape found later would be everybody's error: tokens of all requests are read together."""
    if not isinstance(value, Tensor) or value.shape != shape:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointValueError(f"{name} must give a tensor of shape {list(shape)}, got {got}")


def _pick(scores: Tensor, choosers: Sequence[TokenChooser]) -> Tensor:
    """Token ``[N]`` of each row of scores ``[N, V]``."""
    if not choosers[0].settings.do_sample:
        return scores.argmax(dim=-1)
    probabilities = torch.softmax(scores, dim=-1)
    # What torch.multinomial does for one sample a row, with each row's own generator and without its checks, which
    # wait for the device.
    noise = torch.empty_like(probabilities)
    for row, chooser in enumerate(choosers):
        noise[row].exponential_(1, generator=chooser.generator)
    return probabilities.div_(noise).argmax(dim=-1)
