"""Staddle: cross-silo personalised federated learning with a proof of what left.

The names of ``__all__`` are for programs and notebooks; docs/python.md explains them. Each is
imported when it is first used, so that ``import staddle`` itself takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithms.course import Change as Change
    from .algorithms.course import ContributionsAndState as ContributionsAndState
    from .algorithms.course import Facts as Facts
    from .algorithms.course import SiloState as SiloState
    from .algorithms.course import Stage as Stage
    from .algorithms.course import Survey as Survey
    from .algorithms.exchange.delivery import Combined as Combined
    from .algorithms.exchange.delivery import Delivery as Delivery
    from .algorithms.exchange.parts import Contribution as Contribution
    from .algorithms.exchange.parts import Each as Each
    from .algorithms.exchange.parts import Gram as Gram
    from .algorithms.exchange.parts import Kind as Kind
    from .algorithms.exchange.parts import Mix as Mix
    from .algorithms.exchange.parts import Part as Part
    from .algorithms.exchange.parts import Sum as Sum
    from .algorithms.method import Method as Method
    from .algorithms.method import specs_of_parameters as specs_of_parameters
    from .algorithms.tasks.task import Task as Task
    from .api import testing as testing
    from .api.experiment import Experiment as Experiment
    from .api.federation import Federation as Federation
    from .api.federation import RunningJob as RunningJob
    from .api.operator import OperatorClient as OperatorClient
    from .api.operator import connect as connect
    from .api.partitions import Classes as Classes
    from .api.partitions import Dirichlet as Dirichlet
    from .api.partitions import GroupMixtures as GroupMixtures
    from .api.partitions import LabelGroups as LabelGroups
    from .api.partitions import Shards as Shards
    from .api.partitions import Sources as Sources
    from .api.results import Results as Results
    from .bundle.frames import LoadedModel as LoadedModel
    from .bundle.frames import load_model as load_model
    from .errors import LocalError as LocalError
    from .errors import StaddleError as StaddleError
    from .files.documents import Strict as Strict

_HOMES = {
    "algorithms.course": (
        *("Change", "ContributionsAndState", "Facts", "SiloState", "Stage", "Survey"),
    ),
    "algorithms.exchange.delivery": ("Combined", "Delivery"),
    "algorithms.exchange.parts": ("Contribution", "Each", "Gram", "Kind", "Mix", "Part", "Sum"),
    "algorithms.method": ("Method", "specs_of_parameters"),
    "algorithms.tasks.task": ("Task",),
    "api.experiment": ("Experiment",),
    "api.federation": ("Federation", "RunningJob"),
    "api.operator": ("OperatorClient", "connect"),
    "api.partitions": (
        *("Classes", "Dirichlet", "GroupMixtures", "LabelGroups", "Shards", "Sources"),
    ),
    "api.results": ("Results",),
    "api.testing": ("testing",),
    "bundle.frames": ("LoadedModel", "load_model"),
    "errors": ("LocalError", "StaddleError"),
    "files.documents": ("Strict",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - a test compares it with what type checkers see


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'staddle' has no attribute {name!r}")
    home = import_module(f".{_HOME_OF[name]}", __name__)
    # Of ``testing`` the module itself.
    found = getattr(home, name, home)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)
