"""The states of a simulation's silos: of thousands, most lie elsewhere, or are as at the beginning.

A state is loaded when somebody asks for it, and is not kept for that. What holds one is replaced
and never altered, so what is the same object is the same state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from ..course import SiloState

# a state, or what reads it from where it lies
Held: TypeAlias = SiloState | Callable[[], SiloState]


def load(held: Held) -> SiloState:
    """The state, read where it is not in memory."""
    return held if isinstance(held, SiloState) else held()


class States(Mapping[str, SiloState]):
    """The state of each silo, in job order; ``held`` are those that are not as at the beginning.

    ``beginning`` makes the state before a silo's first round. An instance is never altered.
    """

    def __init__(
        self,
        silos: Sequence[str],
        beginning: Callable[[str], SiloState],
        held: Mapping[str, Held],
    ) -> None:
        self._silos, self._beginning = silos, beginning
        self.held = {silo: held[silo] for silo in silos if silo in held}

    def __getitem__(self, silo: str) -> SiloState:
        """The state, loaded or made where it is not in memory; KeyError for a stranger."""
        return load(self.lying(silo))

    def lying(self, silo: str) -> Held:
        """The state, or what loads or makes it; KeyError for a stranger."""
        if silo in self.held:
            return self.held[silo]
        if silo not in self._silos:
            raise KeyError(silo)
        return partial(self._beginning, silo)

    def __iter__(self) -> Iterator[str]:
        """The silos, in job order."""
        return iter(self._silos)

    def __len__(self) -> int:
        """The number of silos."""
        return len(self._silos)

    def replaced(self, held: Mapping[str, Held]) -> "States":
        """These states with others for some silos."""
        return States(self._silos, self._beginning, self.held | dict(held))


class Beginnings:
    """Makes the states before a first round; keeps them where those of all fit into ``most`` bytes.

    A few of thousands would be asked for seldom, and take memory all the time.
    """

    def __init__(self, made: Callable[[str], SiloState], silos: int, most: int) -> None:
        self._made, self._silos, self._most = made, silos, most
        self._kept: dict[str, SiloState] = {}

    def __call__(self, silo: str) -> SiloState:
        """The state of a silo, the same object each time where it is kept."""
        if silo in self._kept:
            return self._kept[silo]
        state = self._made(silo)
        # Silos of one job have models of much the same size.
        if self._silos * state.nbytes <= self._most:
            self._kept[silo] = state
        return state
