"""An entry of [[methods]] in a simulation's file."""

from typing import Annotated, Any

from pydantic import Field

from ...algorithms.job.job import MethodTable, Rounds

LONGEST_LABEL = 64
# the name of a folder
Label = Annotated[str, Field(pattern=rf"^[A-Za-z0-9][A-Za-z0-9._+=-]{{0,{LONGEST_LABEL - 1}}}$")]


class ChosenMethod(MethodTable):
    """A method, and what is different for it.

    Its tables replace the file's, key by key. The label must be unique in the file.
    """

    label: Label | None = None
    """Names it in folders, tables and curves; left out, the method's name."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Keys of [training] that replace the file's."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Keys of [model] that replace the file's; all methods take the same records."""
    rounds: Rounds | None = None

    @property
    def title(self) -> str:
        """Its label."""
        return self.label or self.name
