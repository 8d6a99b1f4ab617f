"""Words of several vectors, one after another, cut anywhere: memory for one vector at a time."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np

from ...security.arithmetic.fixedpoint import WORD, Group, Words

Each = TypeVar("Each")


class WordReader(Generic[Each]):
    """The numbers of groups, without canaries, in order.

    Call ``begin``, then ``write`` until all are there.
    """

    def __init__(self, take: Callable[[Each, Words], None]) -> None:
        """``take`` is called with each whole vector; an error that it raises ends all."""
        self._take = take
        self._coming: deque[tuple[Each, Group]] = deque()
        self._words: Words = np.empty(0, WORD[32])  # of the first of them
        self._filled = 0  # bytes of it that are here

    def begin(self, coming: Iterable[tuple[Each, Group]]) -> None:
        """Expect these vectors, each with the group of its numbers.

        Memory is allocated for one vector at a time.
        """
        self._coming = deque(coming)
        self._reserve()

    def write(self, chunk: memoryview) -> None:
        """Take the next bytes; not more than all vectors have.

        Each vector is handed to ``take`` as soon as it is complete.
        """
        view = chunk
        while view:
            # Straight into the vector: wire and memory have the same byte order.
            whole = self._words.data.cast("B")
            here, view = view[: len(whole) - self._filled], view[len(whole) - self._filled :]
            whole[self._filled : self._filled + len(here)] = here
            self._filled += len(here)
            if self._filled == len(whole):
                each, _ = self._coming.popleft()
                # ``take`` may keep the vector, so the next one gets new memory.
                self._take(each, self._words)
                self._reserve()

    def _reserve(self) -> None:
        """Allocate memory for the words that come next; none where there are no more."""
        self._filled, self._words = 0, np.empty(0, WORD[32])
        if self._coming:
            _, group = self._coming[0]
            self._words = np.empty(group.body, WORD[group.ring])
