"""The table of commands; a command's module is imported when it runs, or its own help is shown.

Importing PyTorch takes seconds. So ``staddle --help``, the help of a group and the completion of
names import none of these modules: a command's line of help is read from the docstring in its
source.
"""

import ast
import gc
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..proto.channel import require_tls13
from .terminal import printer

# what a user types → module of this folder and function; a leading dot: of the folder around it
COMMANDS: Mapping[str, str] = {
    "status": "federation.status:status",
    "health": "federation.health:health",
    "console": ".console.command:console",
    "demo": "federation.demo:demo",
    "poc up": "poc.up:up",
    "poc run": "poc.run:run",
    "poc status": "poc.up:status",
    "poc down": "poc.up:down",
    "poc export": "poc.export:export",
    "poc add-silo": "poc.add_silo:add_silo",
    "simulate": "simulate.simulate:simulate",
    # of a command, not of a group: ``make_context`` below tells it from a file
    "simulate init": "simulate.example:init",
    "reproduce": "simulate.reproduce:reproduce",
    "keys new": "members.keys:new",
    "keys show": "members.keys:show",
    "keys renew": "members.keys:renew",
    "federation new": "members.founding:new",
    "federation members": "members.founding:members",
    "federation admit": "members.founding:admit",
    "federation remove": "members.founding:remove",
    "federation renew": "members.founding:renew",
    "federation publish": "members.founding:publish",
    "invite": "members.inviting:invite",
    "join": "members.join:join",
    "roster new": "members.roster:new",
    "roster add": "members.roster:add",
    "roster remove": "members.roster:remove",
    "roster sign": "members.roster:sign",
    "roster show": "members.roster:show",
    "roster verify": "members.roster:verify",
    "operator init": "terminal.examples:operator",
    "job init": "job:init",
    "job run": "job:run",
    "job sign": "job:sign",
    "job show": "federation.jobs:show",
    "job submit": "federation.jobs:submit",
    "job list": "federation.jobs:list_",
    "job watch": "federation.jobs:watch",
    "job stop": "federation.jobs:stop",
    "job resume": "federation.jobs:resume",
    "job withdraw": "federation.jobs:withdraw",
    "job results": "federation.results:results",
    "coordinator init": "terminal.examples:coordinator",
    "coordinator check": "coordinator:check",
    "coordinator run": "coordinator:run",
    "coordinator backup": "coordinator:backup",
    "coordinator restore": "coordinator:restore",
    "model make": "model.make:make",
    "model show": "model.show:show",
    "model verify": "model.verify:verify",
    "model predict": "model.predict:predict",
    "model evaluate": "model.evaluate:evaluate",
    "model export": "model.export:export",
    "data inspect": "silo.data:inspect",
    "data statistics": "silo.statistics:statistics",
    "silo init": "terminal.examples:silo",
    "silo check": "silo.agent:check",
    "silo run": "silo.agent:run",
    "silo jobs": "silo.approval:jobs",
    "silo accept": "silo.accepting:accept",
    "silo approve": "silo.approval:approve",
    "silo decline": "silo.approval:decline",
    "silo new-split": "silo.agent:new_split",
    "policy init": "terminal.examples:policy",
    "policy new": "policy.draft:new",
    "policy check": "policy.check:check",
    "ledger verify": "ledger.verify:verify",
    "ledger report": "report.report:report",
    "ledger rekey": "ledger.rekey:rekey",
    "ledger show": "ledger.show:show",
    "ledger summary": "ledger.show:summary",
    "ledger prove": "ledger.proofs:prove",
    "ledger verify-proof": "ledger.proofs:verify_proof",
    "ledger consistency": "ledger.proofs:consistency",
    "ledger verify-consistency": "ledger.proofs:verify_consistency",
    "ledger export": "ledger.proofs:export",
    "ledger verify-export": "ledger.proofs:verify_export",
    "ledger reconcile": "ledger.reconcile:reconcile",
    "privacy plan": "privacy.plan:plan",
    "privacy show": "privacy.show:show",
    "membership show": "simulate.membership:show",
    "partition make": "simulate.partition:make",
    "partition show": "simulate.partition:show",
}
# A group has no function whose docstring could be its help.
GROUPS: Mapping[str, str] = {  # the first word of two: what its help says
    "poc": "A federation on this machine that keeps running, for trying out.",
    "keys": "Make and show the keys of a member: silo, coordinator, operator, founder.",
    "federation": "Found a federation, admit, renew and remove its members.",
    "roster": "Make, change, sign and check the list of a federation's members.",
    "operator": "Configure an operator's access to the coordinator.",
    "job": "Write and sign job files; submit, watch and stop jobs.",
    "coordinator": "Configure, check, run, back up and restore the coordinator daemon.",
    "model": "Use a trained model: verify it, ask it about new records, measure and export it.",
    "data": "Look at a table of records before a silo uses it.",
    "silo": "Configure, check and run a silo agent.",
    "policy": "Write a silo's policy, and show what it allows to leave.",
    "ledger": "Check a silo's ledger, show what left the silo, and prove it to others.",
    "privacy": "What private jobs cost the records of a silo.",
    "membership": "Show the memberships of a ppfl job, where they were released.",
    "partition": "Deal out a simulation's records to its silos, and look at who holds what.",
}


def function(target: str) -> Callable[..., None]:
    """The function of a command, such as ``silo.agent:run``.

    It imports its module and what that needs; typer then reads its annotations and docstring.
    """
    require_tls13()  # before anything imports gRPC, which reads its variables then
    module, _, name = target.partition(":")
    # What is imported stays to the end. To search it for garbage, again and again while it grows,
    # takes a quarter of the time of the imports.
    gc.disable()
    try:
        found: Callable[..., None] = getattr(
            importlib.import_module(f".{module}", __package__), name
        )
    finally:
        gc.freeze()
        gc.enable()
    return found


class _AsWritten:
    """Whose texts of help are shown as they are written.

    Rich would drop words in square brackets, such as the name of a table, as its markup.
    """

    def __init__(self, name: str | None, **options: Any) -> None:
        super().__init__(name=name, **options)  # type: ignore[call-arg] # of a typer class
        for text in (self, *self.params):  # type: ignore[attr-defined] # as above
            text.help = printer.unmarked(text.help)


class _Command(_AsWritten, TyperCommand):
    pass


def program(name: str, target: str) -> typer.Typer:
    """One command on its own: ``target`` as in ``COMMANDS``, whose module is imported."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    # typer needs the function's annotations.
    alone.command(name, cls=_Command)(function(target))
    return alone


class LazyCommand(TyperCommand):
    """A command of which only name and help are known until it parses its options.

    ``TyperCommand`` would need the imported function; this class reads the help from its source.
    """

    def __init__(self, name: str, target: str) -> None:
        """``target`` is a value of ``COMMANDS``."""
        self._target = target
        super().__init__(name)

    def _docstring(self) -> str:
        module, _, name = self._target.partition(":")
        return printer.unmarked(_docstrings(module)[name])

    help: Any = property(_docstring, lambda _, __: None)  # the class above sets it, to nothing

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Parse the command line: from here on the real command stands in for this one.

        Where the first argument makes the path of another command, as in ``simulate init``, it is
        that command.
        """
        further = COMMANDS.get(" ".join([self.name or "", *args[:1]]))
        if further is not None and args:
            inner = LazyCommand(args[0], further)
            return inner.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        # Only now the command's module is imported.
        real = typer.main.get_command(program(self.name or "", self._target))
        return real.make_context(info_name, args, parent, **extra)


class LazyGroup(_AsWritten, TyperGroup):
    """The commands under one word, or those under none with all groups.

    Making it imports no command's module.
    """

    def __init__(self, *, name: str | None = None, **options: Any) -> None:
        """An empty ``name`` is that of the program itself."""
        word = name or ""
        commands: dict[str, Any] = {}
        for path, target in COMMANDS.items():
            # ``first`` is empty for a command without a group.
            first, _, last = path.rpartition(" ")
            if first == word:
                commands[last] = LazyCommand(last, target)
        if not word:
            for group, text in GROUPS.items():
                commands[group] = LazyGroup(name=group, help=text, no_args_is_help=True)
        super().__init__(name=name, **{**options, "commands": commands})


@cache
def _docstrings(module: str) -> dict[str, str]:
    """The docstrings of a module's functions, by name."""
    # Parsed, not imported: an import may load PyTorch, which takes seconds. Only the packages
    # around the module are imported, which hold a docstring and nothing else.
    spec = importlib.util.find_spec(f".{module}", __package__)
    path = Path(str(spec and spec.origin))
    found = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        # Commands are functions of the module, never methods.
        if isinstance(node, ast.FunctionDef):
            found[node.name] = str(ast.get_docstring(node))
    return found
