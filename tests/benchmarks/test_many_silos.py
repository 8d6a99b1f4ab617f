import dataclasses

import pytest


@pytest.mark.parametrize(("silos", "blind"), [(5, False), (4, True)])
def test_all_silos_of_one_process_take_part_in_each_round(forking, silos, blind):
    found = forking.cost(silos, 3, 0.1, blind=blind)
    assert min(found.cpu, found.seconds, found.files) > 0
    # Bytes are read when a closed round is told of, maybe after some of the next round's. How many
    # they are by silo is for the benchmark to say, not for a test.
    assert min(found.sent, found.received) >= 0
    assert found.per_silo == found.cpu / silos
    double = dataclasses.replace(found, silos=2 * silos, cpu=4 * found.cpu)
    assert f"2.00 times that of {silos};" in forking.told([found, double], 0.1).splitlines()[1]
