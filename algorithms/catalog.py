"""The methods that a job may name: those of this table, and those of installed packages.

A package of another project names its methods as entry points, in its own pyproject.toml::

    [project.entry-points."staddle.methods"]
    softper = "softper:SoftPer"

A method of the table followed by ``-adam``, ``-momentum`` or ``-yogi``, such as ``fedrep-adam``, is
that method with a server optimiser (methods/common/server_optimiser.py), and has the options of
both.

Whoever installed the package here decided to run its code; a job only names a method, and no code
comes with it. A package is imported when a job names its method, and not before. The names of the
table are taken.
"""

import difflib
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache, partial
from itertools import product
from typing import Any, cast

from ..errors import LocalError
from ..files import packages
from ..files.documents import Strict, validate
from ..files.program_code import is_program
from .baselines.apfl import APFL
from .baselines.clustered import ClusteredFL
from .baselines.ditto import Ditto
from .baselines.fedadam import FedAdam
from .baselines.fedala import FedALA
from .baselines.fedamp import FedAMP
from .baselines.fedas import FedAS
from .baselines.fedavg_ft import FedAvgFT
from .baselines.fedavgm import FedAvgM
from .baselines.fedbabu import FedBABU
from .baselines.fedbn import FedBN
from .baselines.fedclassavg import FedClassAvg
from .baselines.fedcp import FedCP
from .baselines.feddbe import FedDBE
from .baselines.feddyn import FedDyn
from .baselines.fedem import FedEM
from .baselines.fedfomo import FedFomo
from .baselines.fedgen import FedGen
from .baselines.fedgh import FedGH
from .baselines.fedkd import FedKD
from .baselines.fednova import FedNova
from .baselines.fedntd import FedNTD
from .baselines.fedpac import FedPAC
from .baselines.fedproto import FedProto
from .baselines.fedprox import FedProx
from .baselines.fedrep import FedRep
from .baselines.fedrod import FedRoD
from .baselines.fedyogi import FedYogi
from .baselines.fml import FML
from .baselines.gpfl import GPFL
from .baselines.knn_per import KNNPer
from .baselines.lg_fedavg import LGFedAvg
from .baselines.moon import MOON
from .baselines.per_fedavg import PerFedAvg
from .baselines.pfedfda import PFedFDA
from .baselines.pfedhn import PFedHN
from .baselines.pfedme import PFedMe
from .baselines.scaffold import Scaffold
from .method import Method, Setting
from .methods.common.server_optimiser import OPTIMISERS, composed
from .methods.fedaims.method import FedAIMS
from .methods.fedavg import FedAvg
from .methods.fedper import FedPer
from .methods.fedsimsup.method import FedSimSup
from .methods.fedssa.method import FedSSA
from .methods.local import Local
from .methods.pfedsim import PFedSim
from .methods.ppfl.method import PPFL
from .methods.statistics import Statistics

METHODS: dict[str, type[Method]] = {
    "apfl": APFL,
    "cfl": ClusteredFL,
    "ditto": Ditto,
    "fedadam": FedAdam,
    "fedaims": FedAIMS,
    "fedala": FedALA,
    "fedamp": FedAMP,
    "fedas": FedAS,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedavgm": FedAvgM,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "fedclassavg": FedClassAvg,
    "fedcp": FedCP,
    "feddbe": FedDBE,
    "feddyn": FedDyn,
    "fedem": FedEM,
    "fedfomo": FedFomo,
    "fedgen": FedGen,
    "fedgh": FedGH,
    "fedkd": FedKD,
    "fednova": FedNova,
    "fedntd": FedNTD,
    "fedpac": FedPAC,
    "fedper": FedPer,
    "fedproto": FedProto,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "fedrod": FedRoD,
    "fedsimsup": FedSimSup,
    "fedssa": FedSSA,
    "fedyogi": FedYogi,
    "fml": FML,
    "gpfl": GPFL,
    "knn-per": KNNPer,
    "lg-fedavg": LGFedAvg,
    "local": Local,
    "moon": MOON,
    "per-fedavg": PerFedAvg,
    "pfedfda": PFedFDA,
    "pfedhn": PFedHN,
    "pfedme": PFedMe,
    "pfedsim": PFedSim,
    "ppfl": PPFL,
    "scaffold": Scaffold,
}


class _WithOptimisers(Mapping[str, type[Method]]):
    """Methods of the table with a server optimiser, by names such as ``fedrep-adam``.

    Methods of other packages are left out: a job names their code by the method's own name.
    """

    def __contains__(self, name: object) -> bool:
        inner, _, rule = str(name).rpartition("-")
        return inner in METHODS and rule in OPTIMISERS

    def __getitem__(self, name: str) -> type[Method]:
        """LocalError for a method that has an optimiser already."""
        if name not in self:
            raise KeyError(name)
        return _with_optimiser(name)

    def __iter__(self) -> Iterator[str]:
        for inner, rule in product(METHODS, OPTIMISERS):
            yield f"{inner}-{rule}"

    def __len__(self) -> int:
        return len(METHODS) * len(OPTIMISERS)


# One class for each name, by which options can be compared.
@cache
def _with_optimiser(name: str) -> type[Method]:
    inner, _, rule = name.rpartition("-")
    return composed(name, OPTIMISERS[rule], METHODS[inner], partial(method_options, name))


ALL_METHODS: Mapping[str, type[Method]] = ChainMap(METHODS, {"statistics": Statistics})
"""Those that train a model, and those that only count."""
OWN_METHODS: Mapping[str, type[Method]] = ChainMap(
    METHODS,
    {"statistics": Statistics},
    cast("MutableMapping[str, type[Method]]", _WithOptimisers()),
)
"""The same, and those with a server optimiser: all names that no package can take."""


def without_optimiser(name: str) -> str:
    """``fedrep`` of ``fedrep-adam``; any other name as it is."""
    return name if name not in OWN_METHODS or name in ALL_METHODS else name.rpartition("-")[0]


def names() -> list[str]:
    """All method names that a job may use on this machine, but for those with an optimiser.

    Installed packages are listed, and not imported.
    """
    return sorted({*ALL_METHODS, *packages.names(packages.METHODS)})


def method_class(name: str, origin: str = "method") -> type[Method]:
    """The class of a method; LocalError suggests the nearest name.

    A package's method is imported here; LocalError names the package if its class breaks the
    contract. Errors begin with ``origin``.
    """
    # The table first: an installed package cannot replace a method of Staddle's.
    if name in OWN_METHODS:
        return OWN_METHODS[name]
    if not packages.owners(packages.METHODS, name):
        raise LocalError(f"{origin}: unknown method {name!r}; {_hint(name)}")
    found, where = packages.load(packages.METHODS, name, f"{origin}: method {name!r}")
    return _checked(found, name, where)


def _hint(name: str) -> str:
    known = names()
    near = difflib.get_close_matches(name, {*known, *OWN_METHODS}, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"install the package that has it, or name one of {', '.join(known)}"


def _checked(found: Any, entry: str, where: str) -> type[Method]:
    # Nobody has run this class before: a mistake must show when a job names the method, as an
    # error that names the package, and not as a traceback in the middle of a round.
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise LocalError(
            f"{where}, is not a subclass of staddle.algorithms.method.Method; correct the entry"
            " point"
        )

    # The method's digest is made of name and version: they stand for the code at all silos.
    name = getattr(found, "name", None)
    # A program's class is found by its place.
    if name != entry and not is_program(entry):
        raise LocalError(f"{where}, calls itself {name!r}; give class and entry point one name")
    if not isinstance(getattr(found, "version", None), int):
        raise LocalError(
            f"{where}, has no whole number as its version; give it one, such as version = 1"
        )

    lacking = sorted(getattr(found, "__abstractmethods__", ()))
    if lacking:
        raise LocalError(
            f"{where}, lacks {', '.join(lacking)}; implement what the contract asks for"
        )
    return found


def method_options(name: str, options: Mapping[str, Any], origin: str = "method") -> Strict:
    """Options checked against the method's own model, defaults filled in.

    LocalError names the option that is wrong; its text begins with ``origin``.
    """
    return validate(
        dict(options),
        method_class(name, origin).options_model,
        f"{origin}: [method.options] of {name}",
    )


def configure(name: str, options: Mapping[str, Any] | Strict, setting: Setting) -> Method:
    """A method, ready for either half.

    LocalError for options that the method rejects, or a setting in which it cannot work.
    """
    checked = options if isinstance(options, Strict) else method_options(name, options)
    return method_class(name)(setting, checked)
