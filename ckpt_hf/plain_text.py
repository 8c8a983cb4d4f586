"""A tokenizer for which the marker's characters are ordinary text.

Where boundaries are data (``encode.py``) the marker has no meaning, but a tokenizer that knows it would still turn its
characters into its id. ``split_special_tokens`` of transformers is no way out: it splits every special token. So the
tokenizer is copied with the marker renamed to a string that nobody can write; all other ids stay as they are.
"""

from __future__ import annotations

import copy
import json
import secrets
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from transformers.tokenization_python import Trie

from .markers import MARKER

# Rebuilding a vocabulary of 250,000 takes seconds, so it is done once for each state of a tokenizer.
_backends: WeakKeyDictionary[Any, tuple[object, Tokenizer]] = WeakKeyDictionary()


def without_marker(tokenizer: Any) -> Any:
    """Return a tokenizer that reads as ``tokenizer`` does, but the marker as the characters it is made of.

    ``tokenizer`` itself is left as it is. The copy shares its settings; it is meant for one call.
    """
    return _fast_copy(tokenizer) if tokenizer.is_fast else _slow_copy(tokenizer)


def _fast_copy(tokenizer: Any) -> Any:
    backend = tokenizer.backend_tokenizer
    state = (
        tuple(tokenizer.get_added_vocab().items()),
        *(str(part) for part in (backend.normalizer, backend.pre_tokenizer, backend.post_processor)),
    )
    known = _backends.get(tokenizer)
    if known is None or known[0] != state:
        known = (state, _rename_marker(backend))
        _backends[tokenizer] = known
    plain = copy.copy(tokenizer)
    plain._tokenizer = known[1]
    return plain


def _rename_marker(backend: Tokenizer) -> Tokenizer:
    """Rebuild ``backend`` with the marker's entries renamed, not removed, because ids follow from the order."""
    unwritable = f"<|{secrets.token_hex(16)}|>"
    parts = json.loads(backend.to_str())
    for added in parts["added_tokens"]:
        if added["content"] == MARKER:
            added["content"] = unwritable
    model = parts["model"]
    # A trainer puts its special tokens into the model's own vocabulary too, where a whole-word model finds them.
    if isinstance(model["vocab"], dict):
        model["vocab"] = {unwritable if token == MARKER else token: index for token, index in model["vocab"].items()}
    else:
        model["vocab"] = [[unwritable if token == MARKER else token, score] for token, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [
            merge
            for merge in model["merges"]
            if (merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)) != MARKER
        ]
    return Tokenizer.from_str(json.dumps(parts))


def _slow_copy(tokenizer: Any) -> Any:
    plain = copy.deepcopy(tokenizer)
    index = plain._added_tokens_encoder.pop(MARKER, None)
    plain._added_tokens_decoder.pop(index, None)
    plain._extra_special_tokens = [token for token in plain._extra_special_tokens if str(token) != MARKER]
    plain.tokens_trie = Trie()
    plain._update_trie()
    return plain
