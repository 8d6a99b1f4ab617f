import dataclasses

import pytest


@pytest.mark.parametrize(("silos", "blind"), [(5, False), (4, True)])
def test_all_silos_of_one_process_take_part_in_each_round(forking, silos, blind):
    found = forking.cost(silos, 3, 0.1, blind=blind)
    assert min(found.cpu, found.seconds, found.files) > 0
    # the model of 0.18 MB crosses whole, in both directions
    assert min(found.sent, found.received) > silos * 170_000
    assert found.per_silo == found.cpu / silos
    double = dataclasses.replace(found, silos=2 * silos, cpu=4 * found.cpu)
    assert f"2.00 times that of {silos};" in forking.told([found, double], 0.1).splitlines()[1]
