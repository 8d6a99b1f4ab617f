"""Records that somebody without the log key writes into a ledger's folder."""

from faults.table import refused, row
from support.ledgers import copied, forge, open_log

from staddle.errors import LocalError


@row(
    "forged records behind the checkpoint, some of our own perhaps taken out",
    "none is signed, the folder stays",
)
def records_without_the_log_key(folder, draw):
    path = folder / "ledger"
    with open_log(path) as log:
        older, count = bytes(log.checkpoint()), draw.randrange(1, 20)
        for number in range(count):
            log.append({"type": "note", "n": number})
    cut = draw.randrange(count)
    if cut or draw.random() < 0.5:  # records go only with an older checkpoint put back
        (path / "checkpoint").write_bytes(older)
    forge(path, *({"type": "note", "n": 7} for _ in range(draw.randrange(1, 4))), cut=cut)
    before = copied(path)
    where = f"seq {count - cut}, behind its checkpoint, was not written with this log key"
    refused(lambda: open_log(path).close(), where, LocalError, f"{count} records, {cut} cut")
    assert copied(path) == before
