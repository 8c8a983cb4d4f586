"""Continuous batching over checkpoints: submit prompts from any thread, get their tokens as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from .config import CheckpointConfig
from .errors import CheckpointRuntimeError, CheckpointValueError
from .events import EventSinks
from .handles import Handle, seconds_to_wait
from .open_engines import forget, remember
from .outputs import GenerationOutput, HandleStatus
from .patching import patch, unpatch
from .pins import Pin
from .request_settings import Extras, SettingsReader
from .runner import RUNNER_ATTRIBUTE, runner_of
from .step_loop import StepLoop
from .submissions import PromptReader, Submission, check_in_flight, check_options, length_of, request_names

_IN_FLIGHT = 512


class Engine:
    """Serves prompts with one model from a thread of its own.

    Every step of the model mixes prompts that are computed with answers that are generated; prompts that share a
    beginning up to a marker (or a boundary given as data) compute it once. The tokens of each request are those that
    ``generate`` gives for it alone with the same settings.

    Close it, or use it as a context manager, which waits for the requests in flight and then closes it.

    Args:
        model: a supported model; patched for as long as the engine is open if it is not patched already.
        tokenizer: for prompts that are text, for stop strings and for :meth:`Handle.text`. With a model that is not
            patched yet, the marker is registered with it.
        max_batch_tokens: tokens that one step may carry.
        cache_bytes, cache_slots: limits of what is kept between requests; see :class:`CheckpointConfig`. These three
            belong to the patch, so they must be None for a patched model.
        keep_prompts, keep_answers: whether the end of each prompt, or of each answer, is kept as a checkpoint, so
            that the next turn of a chat starts there; declared boundaries outlive these.

    Raises:
        CheckpointRuntimeError: another engine runs on the model.
        CheckpointValueError: an argument is wrong.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_batch_tokens: int | None = None,
        cache_bytes: int | None = None,
        cache_slots: int | None = None,
        keep_prompts: bool = False,
        keep_answers: bool = False,
    ) -> None:
        check_options(None, keep_prompts=keep_prompts, keep_answers=keep_answers)
        settings = {"max_batch_tokens": max_batch_tokens, "cache_bytes": cache_bytes, "cache_slots": cache_slots}
        given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        self._patched_here = RUNNER_ATTRIBUTE not in getattr(model, "__dict__", {})
        if self._patched_here:
            patch(model, tokenizer, CheckpointConfig(**given))
        elif given:
            raise CheckpointValueError(f"{sorted(given)} must be None for a patched model; give them to ckpt_hf.patch")
        self._model = model
        self._runner = runner_of(model)
        self._keep_prompts, self._keep_answers = keep_prompts, keep_answers
        self._names = request_names()
        self._prompts = PromptReader(model.config, tokenizer, self._runner.marker)
        self._settings = SettingsReader(model, tokenizer, self._runner.marker)
        self._tokenizer = tokenizer
        self._loop = StepLoop(self._runner)
        with self._runner.lock:
            if self._runner.engine is not None:
                raise CheckpointRuntimeError("model already has a running engine; close that one first")
            self._runner.engine = self._loop
        self._loop.start()
        remember(self)

    @property
    def events(self) -> EventSinks:
        """Where to add a listener of what the scheduler and the steps do."""
        return self._runner.events

    def submit(
        self,
        prompt: Any,
        generation_config: Any = None,
        *,
        salt: str | None = None,
        priority: int = 0,
        checkpoint_positions: Any = None,
        seed: int | None = None,
        request_id: str | None = None,
        keep_prompt: bool | None = None,
        keep_answer: bool | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        **settings: Any,
    ) -> Handle:
        """Hand a prompt over; may be called from any thread.

        Args:
            prompt: text (with a tokenizer), token ids (a sequence, or a tensor ``[L]`` or ``[1, L]``), with or without
                markers, or a :class:`ckpt_hf.prompts.Prompt`.
            generation_config, settings: as ``generate`` takes them; greedy search and sampling, without those that
                ``generate`` leaves to transformers' own loop (a static cache, say). An answer is tokens alone.
            salt: callers with different salts never share a checkpoint.
            priority: larger ones run first.
            checkpoint_positions: boundaries as data, numbers of tokens before each.
            seed: of this request's random numbers: those of ``generate`` alone after ``torch.manual_seed(seed)``. By
                default drawn from torch's own generator.
            request_id: a name for it in results.
            keep_prompt, keep_answer: see the engine's arguments, which are the defaults.
            logits_processor, stopping_criteria, prefix_allowed_tokens_fn: as ``generate`` takes them. They run in the
                engine's thread; an exception in one ends this request alone.

        Raises:
            CheckpointValueError: an argument is wrong.
            CheckpointRuntimeError: the engine is closed or its device has failed.
        """
        text = check_options(salt, priority, seed, request_id, keep_prompt=keep_prompt, keep_answer=keep_answer)
        read = self._prompts.read(prompt, checkpoint_positions)
        extras = Extras.read(logits_processor, stopping_criteria, prefix_allowed_tokens_fn)
        chosen = self._settings.read(read.token_ids, generation_config, settings, extras)
        if seed is None and chosen.do_sample:
            seed = int(torch.randint(2**62, ()))
        name = next(self._names) if request_id is None else request_id
        handle = Handle(GenerationOutput(name, list(read.token_ids)), self._tokenizer, self._loop)
        keeps_prompt = self._keep_prompts if keep_prompt is None else keep_prompt
        keeps_answer = self._keep_answers if keep_answer is None else keep_answer
        self._loop.put(Submission(handle, read, chosen, seed, text, priority, keeps_prompt, keeps_answer))
        return handle

    def imap(
        self, prompts: Any, generation_config: Any = None, *, in_flight: int = _IN_FLIGHT, **options: Any
    ) -> Iterator[GenerationOutput]:
        """Results of many prompts in their order, each as soon as it and those before it are there.

        Prompts are read as they are needed: at most ``in_flight`` are submitted and not yet handed out. A request that
        fails gives an output with ``error`` set. Leaving the iterator early cancels the rest.

        Args:
            prompts: an iterable of prompts, or a batch of :func:`ckpt_hf.encode` or of a tokenizer.
            generation_config, options: as :meth:`submit`, for all of them.
        """
        check_in_flight(in_flight)
        return self._stream(self._prompts.rows(prompts), generation_config, in_flight, options)

    def map(
        self, prompts: Any, generation_config: Any = None, *, progress_bar: bool = True, **options: Any
    ) -> list[GenerationOutput]:
        """Results of many prompts in their order, with a progress bar on stderr; arguments as :meth:`imap`."""
        results = self.imap(prompts, generation_config, **options)
        bar, hidden = Console(stderr=True), not progress_bar
        return list(track(results, "generating", length_of(prompts), console=bar, transient=True, disable=hidden))

    def pin(self, prefix: Any, *, salt: str | None = None, timeout: float | None = None) -> Pin:
        """Compute the states after ``prefix`` if they are not cached, and keep them until the pin is released.

        Args:
            prefix: text or ids as :meth:`submit` takes them; prompts that begin with exactly these ids start from its
                end. Markers in it are boundaries like any other.
            salt: of the callers that it is for.
            timeout: seconds to wait.

        Raises:
            TimeoutError: it was not computed in time, and is not pinned.
            CheckpointValueError: an argument is wrong.
            CheckpointRuntimeError: the cache's limits have no room for what is pinned, the calling thread runs a step,
                or as :meth:`submit`.
        """
        seconds = seconds_to_wait(timeout)
        self._loop.refuse_within_step("pin a prefix")
        read = self._prompts.read(prefix)
        ends = len(read.token_ids)
        if ends not in read.boundaries:
            read = replace(read, boundaries=(*read.boundaries, ends))
        handle = Handle(GenerationOutput(next(self._names), list(read.token_ids)), None, self._loop)
        self._loop.put(Submission(handle, read, None, None, check_options(salt), 0, False, False))
        return self._loop.wait_for_pin(handle, seconds)

    def close(self, drain: bool = False) -> None:
        """Stop serving and give back what the engine changed. A second call does nothing.

        Args:
            drain: wait for the requests in flight; otherwise each of them ends with an error.

        Raises:
            CheckpointRuntimeError: a step runs in this thread, from a processor, say.
        """
        self._loop.close(drain)
        with self._runner.lock:
            if self._runner.engine is not self._loop:
                return
            self._runner.engine = None
        forget(self)
        if self._patched_here:
            unpatch(self._model)

    def give_up(self) -> None:
        """For a forked child, which has no copy of the thread: every call says so from now on."""
        self._loop.give_up()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, error_type: Any, *_: object) -> None:
        self.close(drain=error_type is None)

    def _stream(
        self, prompts: Iterator[Any], config: Any, in_flight: int, options: dict[str, Any]
    ) -> Iterator[GenerationOutput]:
        handles: deque[Handle] = deque()
        try:
            for prompt in prompts:
                handles.append(self._submit_one(prompt, config, options))
                if len(handles) == in_flight:
                    yield _ended(handles.popleft())
            while handles:
                yield _ended(handles.popleft())
        finally:
            for handle in handles:
                handle.cancel()

    def _submit_one(self, prompt: Any, config: Any, options: dict[str, Any]) -> Handle:
        """A prompt that cannot be read fails alone; settings that are wrong are wrong for all."""
        own = dict(options)
        try:
            read = self._prompts.read(prompt, own.pop("checkpoint_positions", None))
        except CheckpointValueError as error:
            handle = Handle(GenerationOutput(next(self._names), []), self._tokenizer, self._loop)
            handle.end(HandleStatus.FAILED, "failed", None, error)
            return handle
        return self.submit(read, config, **own)


def _ended(handle: Handle) -> GenerationOutput:
    handle.wait()
    return handle.output
