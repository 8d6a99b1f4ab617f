"""An engine whose rounds go through the files of an order, as with a trainer apart from the agent.

``compute`` computes an order in its folder: in this process, which takes no time to start.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from staddle.algorithms.engines.engine import Serial
from staddle.algorithms.training.paid_ahead import pay
from staddle.silo.training.order import DeviceTable, OrderedRecords, OrderFolder
from staddle.silo.training.serving import serve
from staddle.silo.training.trainer import SiloRound, TrainingDevice


class Direct(Serial):
    """Trains each silo in this thread, as the agent does it."""

    def _train(self, round_, one):
        own, payer = self._records[one.silo], self._paying.get(one.silo)
        of = OrderedRecords(self._job, own.train, own.test)
        asked = SiloRound(of, one.silo, round_, one.state, one.delivered, private=payer)
        outcome = self.outcome(asked)
        if outcome.spending is not None:
            payer.account.commit(outcome.spending)
        return outcome

    def outcome(self, asked):
        return TrainingDevice().outcome(asked)


class ByOrder(Direct):
    """Trains each silo by an order."""

    compute = staticmethod(serve)

    def outcome(self, asked):
        paid, spending = None, None
        if asked.private is not None:
            of = asked.of
            paid, spending = pay(of.job, asked.silo, asked.round, of.train, asked.private)
        with tempfile.TemporaryDirectory() as path:
            folder = OrderFolder(Path(path))
            folder.put(asked, DeviceTable(), paid)
            self.compute(folder)
            outcome, taken = folder.outcome(asked)
        for purpose, steps in taken.items():
            for _ in range(steps):
                spending.take(purpose)
        return replace(outcome, spending=spending)
