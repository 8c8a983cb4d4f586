"""``patch`` and ``unpatch``: one model instance, in place, and back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .collector import Collector
from .config import CheckpointConfig
from .errors import CheckpointError, CheckpointRuntimeError, CheckpointValueError
from .families import PACKED_CLASSES, ModelLayers, find_layers
from .generate import generate
from .markers import check_tokenizer, register_marker
from .runner import RUNNER_ATTRIBUTE, ModelRunner, runner_of
from .stats import CheckpointStats

Model = TypeVar("Model", bound=PreTrainedModel)

_ORIGINAL_CLASSES: dict[type[nn.Module], type[nn.Module]] = {packed: base for base, packed in PACKED_CLASSES.items()}
_PROBE_TOKENS, _PROBE_BOUNDARY = 9, 5
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 1e-1


def patch(model: Model, tokenizer: Any = None, config: CheckpointConfig | None = None) -> Model:
    """Teach one model instance to save its state where a prompt says so.

    After this, ``model.generate`` looks for the marker ``<|mamba_checkpoint|>`` (or ``checkpoint_positions``) in its
    prompts, computes each marked prefix once, keeps its states and starts every other prompt with the same prefix from
    them. Calls without a marker are transformers' own.

    Args:
        model: a ``Qwen3_5ForCausalLM`` or ``Qwen3_5MoeForCausalLM`` on one device.
        tokenizer: the model's tokenizer; the marker is registered with it as a special token. Without one, boundaries
            can only be given as ``checkpoint_positions``.
        config: limits and dtypes; see :class:`CheckpointConfig`.

    Returns:
        ``model`` itself.

    Raises:
        CheckpointValueError: the model is not supported or the tokenizer is not the model's.
        CheckpointRuntimeError: the model is already patched, is split over devices, or does not give the same logits
            once patched.
    """
    if config is not None and not isinstance(config, CheckpointConfig):
        raise CheckpointValueError(f"config must be a CheckpointConfig or None, got {type(config).__name__}")
    if isinstance(model, nn.Module) and RUNNER_ATTRIBUTE in model.__dict__:
        raise CheckpointRuntimeError(
            "model is already patched; call ckpt_hf.unpatch(model) first to change its settings"
        )
    layers = find_layers(model)
    _check_placement(model)
    marker = None
    if tokenizer is not None:
        check_tokenizer(tokenizer, model.config.vocab_size)
        marker = register_marker(tokenizer)
    settings = config if config is not None else CheckpointConfig()
    _swap_classes(layers, PACKED_CLASSES)
    model.__dict__[RUNNER_ATTRIBUTE] = ModelRunner(model, marker, settings)
    # Not a bound method: those are pickled as an attribute's name, which would be read as the class's own generate.
    model.__dict__["generate"] = partial(generate, model)
    if settings.verify:
        try:
            _verify(model, runner_of(model))
        except BaseException as error:
            unpatch(model)
            if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                raise
            raise CheckpointRuntimeError(f"model cannot run the packed layers on this device: {error!r}") from error
    return model


def unpatch(model: Model) -> Model:
    """Undo :func:`patch`: transformers' classes and ``generate`` again, all checkpoints freed.

    Raises:
        CheckpointRuntimeError: the model is not patched, it is generating in this thread, or an engine runs on it.
    """
    runner = runner_of(model)
    with runner.call_lock, runner.lock:
        if runner.engine is not None:
            raise CheckpointRuntimeError("cannot unpatch while an engine runs on the model; close it first")
        runner.refuse_within_call("unpatch")
        del model.__dict__[RUNNER_ATTRIBUTE], model.__dict__["generate"]
        bases = tuple(_ORIGINAL_CLASSES)
        packed = {i: m for i, m in enumerate(model.modules()) if isinstance(m, bases)}
        _swap_classes(ModelLayers(packed, {}), _ORIGINAL_CLASSES)
    return model


def stats(model: nn.Module) -> CheckpointStats:
    """Counters of a patched model, and the report of its last call's rows."""
    runner = runner_of(model)
    with runner.lock:
        if not runner.started:
            return replace(runner.stats, evictions=0, checkpoints=0, slots_used=0, bytes_used=0)
        index = runner.index
        current = replace(runner.stats, evictions=index.evictions, checkpoints=len(index))
        current.slots_used, current.bytes_used = runner.slots.used, index.bytes_used()
        return current


def reset_stats(model: nn.Module) -> None:
    """Set the counters back to zero; checkpoints stay."""
    runner = runner_of(model)
    with runner.lock:
        runner.stats = CheckpointStats()
        if runner.started:
            runner.index.evictions = 0


def clear(model: nn.Module) -> None:
    """Forget every checkpoint of a patched model."""
    runner = runner_of(model)
    with runner.lock:
        if runner.started:
            runner.index.clear()


def _check_placement(model: nn.Module) -> None:
    device_map = getattr(model, "hf_device_map", None) or {}
    places = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    places |= {str(place) for place in device_map.values() if str(place) in ("cpu", "disk", "meta")}
    if len(places) > 1 or "meta" in places or "disk" in places:
        raise CheckpointRuntimeError(
            f"model is split over {sorted(places)}; a patched model must lie on one device, without offloading"
        )


def _swap_classes(layers: ModelLayers, classes: dict[type[nn.Module], type[nn.Module]]) -> None:
    for layer in (*layers.gdn.values(), *layers.attention.values()):
        hook = getattr(layer, "_hf_hook", None)
        if hook is None:
            layer.__class__ = classes[type(layer)]
            continue
        # accelerate keeps the bound forward of the old class in its hook, so the hook comes off first.
        from accelerate.hooks import add_hook_to_module, remove_hook_from_module

        remove_hook_from_module(layer)
        if getattr(layer.__dict__.get("forward"), "__func__", None) is type(layer).forward:
            del layer.__dict__["forward"]  # the hook's removal left it bound to the old class
        layer.__class__ = classes[type(layer)]
        add_hook_to_module(layer, hook)


@torch.no_grad()
def _verify(model: Any, runner: ModelRunner) -> None:
    """Compare the packed path, cut in the middle, with one plain forward."""
    step = max(1, (model.config.vocab_size - 1) // (_PROBE_TOKENS + 1))
    token_ids = [(i + 1) * step % model.config.vocab_size for i in range(_PROBE_TOKENS)]
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with runner.call(), torch.autocast(model.device.type, enabled=False):
            collector = Collector(runner)
            request = runner.new_request(
                token_ids, (_PROBE_BOUNDARY,), b"probe", ephemeral=frozenset({_PROBE_BOUNDARY})
            )
            try:
                runner.add(request, collector)
                actual = collector.collect([request])[0].float()
            finally:
                runner.finish([request])
            runner.stats = CheckpointStats()
            ids = torch.tensor([token_ids], device=model.device)
            plain = model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        for module, mode in training.items():
            module.training = mode
    expected = plain.logits[0, -1].float()
    error = ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    if not error <= _PROBE_TOLERANCE.get(model.dtype, _HALF_TOLERANCE):
        raise CheckpointRuntimeError(
            f"the patched model's logits differ from the unpatched model's by {error:.2e} (relative norm) on a "
            f"probe of {_PROBE_TOKENS} tokens; this version of transformers or this device is not supported"
        )
