"""What :func:`ckpt_hf.advise` answers with, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from .trace_headline import amount

_LISTED = 20


@dataclass(frozen=True, slots=True)
class AdvisedBoundary:
    """One place where a checkpoint pays.

    Attributes:
        position: number of tokens before it; ``checkpoint_positions`` takes this.
        prompts: how many prompts of the log begin with these tokens.
        tokens_saved: tokens that need not be computed again, beyond what the advised boundary before it saves.
        starts_from: position of that boundary, or 0.
        checkpoint_bytes: what the checkpoint takes on top of that boundary's; None without a model.
        declared: how many of the prompts have a boundary there already.
        example: index of a prompt that has it.
        characters: characters of that prompt's text before it, markers not counted, where :func:`ckpt_hf.encode` may
            split the text; None for prompts of ids, and for tokenizers without offsets.
        tail: the text just before it, if known.
    """

    position: int
    prompts: int
    tokens_saved: int
    starts_from: int
    checkpoint_bytes: int | None
    declared: int
    example: int
    characters: int | None
    tail: str | None


@dataclass(frozen=True, slots=True)
class Advice:
    """Boundaries that pay, those that save most first, for a log of ``prompts`` prompts and ``tokens`` tokens.

    The figures hold while all checkpoints stay in the cache; ``min_saved`` is the least that each one adds.
    """

    boundaries: tuple[AdvisedBoundary, ...]
    prompts: int
    tokens: int
    min_saved: int

    @property
    def tokens_saved(self) -> int:
        """Tokens that need not be computed with all of the boundaries."""
        return sum(boundary.tokens_saved for boundary in self.boundaries)

    @property
    def checkpoint_bytes(self) -> int | None:
        """Bytes of all the checkpoints; None without a model."""
        sizes = [boundary.checkpoint_bytes for boundary in self.boundaries]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def __rich__(self) -> ConsoleRenderable:
        share = self.tokens_saved / self.tokens
        lead = f"{self.prompts:,} prompt{'' if self.prompts == 1 else 's'} of {self.tokens:,} tokens: "
        if not self.boundaries:
            return Text(f"{lead}no boundary would save {self.min_saved:,} tokens or more.", style="bold")
        size = self.checkpoint_bytes
        cost = "" if size is None else f" for {amount(size)} of checkpoints"
        count = len(self.boundaries)
        places = f"{count:,} boundar{'y' if count == 1 else 'ies'}"
        title = Text(f"{lead}{places} would save {self.tokens_saved:,} ({share:.0%}){cost}.", style="bold")
        left = len(self.boundaries) - _LISTED
        return Group(title, self._table(), *([Text(f"and {left:,} more")] if left > 0 else []))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        sized = self.checkpoint_bytes is not None
        for heading in ("token", "prompts", "saves", *(["bytes"] if sized else []), "has it", "example"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("split the text after", overflow="ellipsis", no_wrap=True)
        for b in self.boundaries[:_LISTED]:
            size = [] if b.checkpoint_bytes is None else [amount(b.checkpoint_bytes)]
            tail = Text("" if b.tail is None else "…" + repr(b.tail)[-24:-1])
            figures = [f"{b.position:,}", f"{b.prompts:,}", f"{b.tokens_saved:,}", *size, f"{b.declared:,}"]
            table.add_row(*figures, f"#{b.example:,}", tail)
        return table
