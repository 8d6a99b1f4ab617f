"""The methods that a job may name."""

import difflib
from collections.abc import Mapping
from typing import Any

from ..errors import LocalError
from ..files import Strict, validate
from .apfl import APFL
from .ditto import Ditto
from .fedaims import FedAIMS
from .fedavg import FedAvg
from .fedavg_ft import FedAvgFT
from .fedbabu import FedBABU
from .fedbn import FedBN
from .fedper import FedPer
from .fedprox import FedProx
from .fedrep import FedRep
from .fedsimsup import FedSimSup
from .fedssa import FedSSA
from .lg_fedavg import LGFedAvg
from .local import Local
from .method import Method, Setting
from .per_fedavg import PerFedAvg
from .pfedme import PFedMe
from .pfedsim import PFedSim
from .ppfl import PPFL

METHODS: dict[str, type[Method]] = {
    "apfl": APFL,
    "ditto": Ditto,
    "fedaims": FedAIMS,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "fedper": FedPer,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "fedsimsup": FedSimSup,
    "fedssa": FedSSA,
    "lg-fedavg": LGFedAvg,
    "local": Local,
    "per-fedavg": PerFedAvg,
    "pfedme": PFedMe,
    "pfedsim": PFedSim,
    "ppfl": PPFL,
}


def method_class(name: str, origin: str = "method") -> type[Method]:
    """The class of a method; LocalError suggests the nearest name."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known methods: {', '.join(sorted(METHODS))}"
        raise LocalError(f"{origin}: method.name = {name!r} is no method; {hint}")
    return METHODS[name]


def method_options(name: str, options: Mapping[str, Any], origin: str = "method") -> Strict:
    """Options checked against the method's own model, defaults filled in."""
    return validate(dict(options), method_class(name, origin).options_model, f"{origin}: [method.options] of {name}")


def configure(name: str, options: Mapping[str, Any] | Strict, setting: Setting) -> Method:
    """A method, ready for either half."""
    checked = options if isinstance(options, Strict) else method_options(name, options)
    return method_class(name)(setting, checked)
