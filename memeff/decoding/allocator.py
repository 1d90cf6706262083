"""Define `PageAllocator`, which knows on the host which sequence owns which page."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from memeff.inputs import check_size, kind_of
from memeff.shape import ceil_div


class PageAllocator:
    """A record of which sequences own which pages of a pool: plain Python, on the host.

    A server adds a sequence, extends it before each step, and frees it at its end:

    >>> allocator = PageAllocator(pages=4, page_size=16)
    >>> allocator.add("prompt")
    >>> allocator.extend("prompt", 20)
    []
    >>> allocator.fork("prompt", "beam")  # shares both pages
    >>> allocator.free_pages, allocator.owners(0)
    (2, 2)
    >>> allocator.extend("beam", 1)  # copy page 1 to page 2 before the beam writes into it
    [(1, 2)]
    >>> allocator.table(["prompt", "beam"], 3)
    array([[ 0,  1, -1],
           [ 0,  2, -1]], dtype=int32)
    >>> allocator.free("prompt")
    >>> allocator.free_pages
    2

    A call that raises an error changes nothing. Pages are handed out in the order of their numbers,
    and freed pages after all others, so that equal calls give equal tables.
    """

    def __init__(self, pages: int, page_size: int):
        """Make an allocator of `pages` pages of `page_size` tokens each."""
        self.pages = check_size("pages", pages)
        self.page_size = check_size("page_size", page_size)
        self._free = deque(range(self.pages))  # next page first
        self._owners = [0] * self.pages
        self._pages: dict[Hashable, list[int]] = {}
        self._lengths: dict[Hashable, int] = {}

    @property
    def free_pages(self) -> int:
        """Return the number of pages that no sequence owns."""
        return len(self._free)

    @property
    def sequences(self) -> list[Hashable]:
        """Return the names of all sequences, in the order in which they were added."""
        return list(self._pages)

    def owners(self, page: int) -> int:
        """Return the number of sequences that own `page`."""
        if check_size("page", page, 0) >= self.pages:
            raise ValueError(f"page={page}: the pool has pages 0 to {self.pages - 1}.")
        return self._owners[page]

    def length(self, name: Hashable) -> int:
        """Return the number of tokens for which sequence `name` was extended."""
        self._check_known(name)
        return self._lengths[name]

    def add(self, name: Hashable) -> None:
        """Add an empty sequence. `name` is anything with a hash.

        Raises: ValueError if there is a sequence of that name.
        """
        self._check_new(name)
        self._pages[name] = []
        self._lengths[name] = 0

    def fork(self, name: Hashable, child: Hashable, tokens: int | None = None) -> None:
        """Add sequence `child`, which shares the first `tokens` tokens of `name` (None: all).

        In this way beams and samples share a prompt, and requests share a prefix. Nothing is copied
        until one of them writes into a shared page.

        Raises: ValueError if there is no `name`, or a `child` already, or `tokens` is too large.
        """
        self._check_known(name)
        self._check_new(child)
        tokens = self._check_tokens(name, self._lengths[name] if tokens is None else tokens)
        shared = self._pages[name][: ceil_div(tokens, self.page_size)]
        for page in shared:
            self._owners[page] += 1
        self._pages[child] = shared
        self._lengths[child] = tokens

    def extend(self, name: Hashable, tokens: int) -> list[tuple[int, int]]:
        """Make room for `tokens` more tokens of sequence `name`.

        Returns:
          pairs (source, target) of pages that must be copied before the tokens are written, because
          another sequence owns the source, too: pass them to `PagedKVCache.copy_pages`. There is at
          most one.

        Raises:
          ValueError: if there is no such sequence.
          MemoryError: if there are too few free pages. Then nothing has changed.
        """
        self._check_known(name)
        tokens = check_size("tokens", tokens, 0)
        sequence_pages = self._pages[name]
        length = self._lengths[name]
        in_last = length % self.page_size  # tokens that the last page holds
        copies = bool(tokens and in_last and self._owners[sequence_pages[-1]] > 1)
        missing = ceil_div(length + tokens, self.page_size) - len(sequence_pages)
        needed = missing + copies
        if needed > len(self._free):
            raise MemoryError(
                f"out of pages: {tokens} more tokens of sequence {name!r} need {needed} pages of "
                f"{self.page_size} tokens, and {len(self._free)} of {self.pages} are free. Free a "
                f"sequence (there are {len(self._pages)}), or make a larger pool."
            )
        pairs = []
        if copies:
            source = sequence_pages[-1]
            sequence_pages[-1] = self._take()
            self._owners[source] -= 1
            pairs.append((source, sequence_pages[-1]))
        sequence_pages.extend(self._take() for _ in range(missing))
        self._lengths[name] = length + tokens
        return pairs

    def truncate(self, name: Hashable, tokens: int) -> None:
        """Keep the first `tokens` tokens of sequence `name`, and free the pages after them.

        Raises: ValueError if there is no such sequence, or it is shorter.
        """
        self._check_known(name)
        tokens = self._check_tokens(name, tokens)
        kept = ceil_div(tokens, self.page_size)
        sequence_pages = self._pages[name]
        self._give_back(sequence_pages[kept:])
        self._pages[name] = sequence_pages[:kept]
        self._lengths[name] = tokens

    def drop_oldest(self, name: Hashable, tokens: int) -> int:
        """Give back the pages of sequence `name` that hold only some of its first `tokens` tokens.

        A layer with a window does so with the tokens that no query sees any more. Such layers have
        an allocator and a pool of their own.

        Returns: the number of tokens that were dropped, a multiple of `page_size`. The sequence
          then begins with the token after them.

        Raises: ValueError if there is no such sequence, or it is shorter.

        Example:
          >>> allocator = PageAllocator(pages=4, page_size=16)
          >>> allocator.add("a")
          >>> copies = allocator.extend("a", 60)
          >>> allocator.drop_oldest("a", 60 - 20), allocator.length("a"), allocator.free_pages
          (32, 28, 2)
        """
        self._check_known(name)
        count = self._check_tokens(name, tokens) // self.page_size
        sequence_pages = self._pages[name]
        self._give_back(sequence_pages[:count])
        self._pages[name] = sequence_pages[count:]
        dropped = count * self.page_size
        self._lengths[name] -= dropped
        return dropped

    def free(self, name: Hashable) -> None:
        """Remove sequence `name`, and free the pages that no other sequence owns.

        Raises: ValueError if there is no such sequence.
        """
        self._check_known(name)
        self._give_back(self._pages.pop(name))
        del self._lengths[name]

    def table(self, names: Sequence[Hashable], pages_per_sequence: int) -> np.ndarray:
        """Return the page_table [B, pages_per_sequence], int32, of the sequences `names`.

        Raises: ValueError if a sequence is not known or has more pages.
        """
        names = _names(names)
        n = check_size("pages_per_sequence", pages_per_sequence)
        table = np.full((len(names), n), -1, np.int32)
        for row, name in zip(table, names, strict=True):
            self._check_known(name)
            sequence_pages = self._pages[name]
            if len(sequence_pages) > n:
                raise ValueError(
                    f"sequence {name!r} has {len(sequence_pages)} pages, and "
                    f"pages_per_sequence={n}: make the table wider."
                )
            row[: len(sequence_pages)] = sequence_pages
        return table

    def lengths(self, names: Sequence[Hashable]) -> np.ndarray:
        """Return the numbers of tokens [B], int32, for which sequences `names` were extended."""
        return np.array([self.length(name) for name in _names(names)], np.int32)

    def _take(self) -> int:
        """Return a free page, which then has one owner."""
        page = self._free.popleft()
        self._owners[page] = 1
        return page

    def _give_back(self, pages: list[int]) -> None:
        """Count one owner less of each page, and free those without an owner."""
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def _check_tokens(self, name, tokens) -> int:
        """Return a number of the sequence's tokens as an int. Refuse more than there are."""
        tokens = check_size("tokens", tokens, 0)
        length = self._lengths[name]
        if tokens > length:
            raise ValueError(
                f"tokens={tokens}: sequence {name!r} has {length} tokens. Pass at most {length}."
            )
        return tokens

    def _check_known(self, name: Hashable) -> None:
        _check_name(name)
        if name not in self._pages:
            raise ValueError(f"there is no sequence {name!r}: add it first.")

    def _check_new(self, name: Hashable) -> None:
        _check_name(name)
        if name in self._pages:
            raise ValueError(f"there is a sequence {name!r} already: free it first.")


def _check_name(name: Any) -> None:
    try:
        hash(name)  # a tuple has a hash if its elements have one
    except TypeError as e:
        raise TypeError(f"the name of a sequence must be hashable, got {kind_of(name)}.") from e


def _names(names: Any) -> list[Any]:
    """Return the names of sequences as a list."""
    try:
        if not isinstance(names, str):
            return list(names)
    except TypeError:
        pass
    raise TypeError(f"names must be a list of names of sequences, got {kind_of(names)}.")
