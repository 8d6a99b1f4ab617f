"""A coordinator's own ledger that is missing, or older than its database."""

import shutil

from faults.table import refused, row
from support.ledgers import FEDERATION, HASH, OTHER_KEY, write_serving, write_stop

from staddle.errors import LocalError
from staddle.security.ledger.ingress_ledger import ReceivingLedger
from staddle.security.log import note as notes
from staddle.security.log.head import stored
from staddle.security.log.tree_head import TreeHead


def opened(folder, known=None):
    return ReceivingLedger.open(folder, "coordinator", FEDERATION, OTHER_KEY, known)


def lived(folder, lives):
    """It served so many times; the head that its database has then."""
    for _ in range(lives):
        with opened(folder) as ledger:
            write_serving(ledger, "coordinator", "staddle", HASH)
            write_stop(ledger, "asked to stop")
    return TreeHead.parse(notes.parse(bytes(stored(folder))).text)


@row(
    "the ledger is missing, or an older copy was put back",
    "no new one is begun; with the newest it goes on",
)
def ledger_put_back(folder, draw):
    path, older, newest = folder / "ledger", folder / "older", folder / "newest"
    lived(path, draw.randrange(1, 4))
    shutil.copytree(path, older)
    known = lived(path, draw.randrange(1, 4))
    path.rename(newest)
    missing = draw.random() < 0.5
    if not missing:
        shutil.copytree(older, path)
    said = "the ledger is missing" if missing else "is not the ledger that the database knows"
    why = refused(lambda: opened(path, known).close(), path, LocalError, said)
    assert said in why
    assert path.exists() != missing
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(newest, path)
    with opened(path, known) as ledger:
        write_serving(ledger, "coordinator", "staddle", HASH)
