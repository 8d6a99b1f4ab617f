"""Silos whose records ask for too much, or come from no file, decline at once."""

import io
import os
import struct
import zipfile

SILOS = ("north", "east", "south")


def claim_400_gb(path):
    """Arrays of which one's header claims 400 GB."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (100000000000,)}\n"
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in ("x", "y"):
            archive.writestr(
                f"{name}.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header
            )
    path.write_bytes(made.getvalue())


def test_silos_decline(start, document):
    running = start(*SILOS)
    job = running.job(document("claims", SILOS))
    running.start_coordinator()
    for silo in SILOS:
        running.write_silo(silo)
    claims = running.federation.folder / "north" / "data.npz"
    claim_400_gb(claims)
    fifo = running.federation.folder / "east" / "scans" / "0" / "1.png"
    fifo.parent.mkdir(parents=True)
    os.mkfifo(fifo)
    config = running.federation.silo_config("east")
    config.write_text(
        config.read_text().replace('file = "data.npz"\n', 'kind = "images"\nfolder = "scans"\n')
    )
    for silo in SILOS:
        running.start_silo(silo)
    for silo, why in (
        (
            "north",
            (
                f"{claims}, holds {claims.stat().st_size:,} bytes: the header of array 'x' claims"
                " float32"
            ),
        ),
        ("east", f"{fifo}: is a FIFO, not a file; put a file with the records there"),
    ):
        declined = running.daemons[silo].wait_for("job.declined", 60)
        assert (declined["job"], declined["code"]) == ("claims", "DATA")
        assert declined["why"].startswith(why)
    running.withdrawn(job, "north", "east")
    running.stop()
    for daemon in running.daemons.values():
        assert "Traceback" not in daemon.log.read_text()
