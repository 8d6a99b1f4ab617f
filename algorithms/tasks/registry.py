"""The tasks that a job may name: those of this table, and those of installed packages.

A package of another project names its task as an entry point of group ``staddle.tasks``, whose
value is a subclass of ``Task``; the [task] table's ``kind`` is the entry point's name.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, TypeAlias

from pydantic import PlainValidator, SerializeAsAny

from ...errors import LocalError
from ...files import packages
from ...files.tagged import of_kind
from .classification import Classification
from .multilabel import Multilabel
from .regression import Regression
from .segmentation import Segmentation
from .survival import DiscreteSurvival
from .task import Task

TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "segmentation": Segmentation,
    "survival": DiscreteSurvival,
}


def _of_its_kind(value: Any) -> Task:
    match value:
        case Task():
            return value
        # Not the other way round: to ask what is installed takes as long as all the rest of a job.
        case {"kind": str(kind)} if kind not in TASKS and kind in packages.names(packages.TASKS):
            return _foreign(kind).model_validate(value)
        case _:
            return of_kind(value, TASKS)


def _foreign(kind: str) -> type[Task]:
    try:
        found, where = packages.load(packages.TASKS, kind, f"task {kind!r}")
    # As pydantic tells what is wrong with a file.
    except LocalError as error:
        raise ValueError(str(error)) from error
    if isinstance(found, type) and issubclass(found, Task):
        return found
    raise ValueError(f"{where}, is no subclass of Task; correct the entry point")


def guard(task: Task) -> AbstractContextManager[None]:
    """LocalError for whatever the code of a task raises that is not Staddle's own."""
    # A failure of our own code would be a bug, and must show as one.
    if task.kind in TASKS:
        return nullcontext()
    return packages.others_code(f"task {task.kind!r} fails", "correct it, or choose another")


TaskTable: TypeAlias = Annotated[SerializeAsAny[Task], PlainValidator(_of_its_kind)]
