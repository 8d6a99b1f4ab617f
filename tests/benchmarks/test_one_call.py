from argparse import Namespace


def test_one_call_launches_less_and_trains_the_same(program):
    given = Namespace(
        silos=3, records=4, epochs=1, rounds=2, network="convnet-3x64", form="grouped",
        device="cpu",
    )  # fmt: skip
    job = program.job_of(given)
    (less, _), one = program.played(job, given, counted=True)
    with program.in_groups():
        (more, _), other = program.played(job, given, counted=True)
    assert 100 < int(less) < 0.7 * int(more)
    assert one.keys() == other.keys()
    assert all((one[name] - other[name]).abs().max() < 1e-4 for name in one)
    assert program.FedAIMS.stages.__qualname__ == "FedAIMS.stages"
