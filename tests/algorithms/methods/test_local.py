from support.refusals import refused

DIGITS = {"name": "digits-cnn-a", "input": [1, 8, 8]}


def sizes(job):
    modules = {silo: job.method().modules(silo) for silo in job.silos}
    return {
        silo: sum(p.numel() for part in own.values() for p in part.parameters())
        for silo, own in modules.items()
    }


def test_silos_have_the_job_s_model_or_the_architecture_that_is_their_turn(make_job):
    a, b = (
        next(iter(sizes(make_job("local", model={**DIGITS, "name": f"digits-cnn-{x}"})).values()))
        for x in "ab"
    )
    assert a != b
    mixed = make_job(
        "local", {"extractors": ["digits-cnn-b", "digits-cnn-a"]}, DIGITS, silos=["r", "s", "t"]
    )
    assert sizes(mixed) == {"r": b, "s": a, "t": b}
    assert sizes(make_job("local", model=DIGITS, silos=["r", "s"])) == {"r": a, "s": a}


def test_an_architecture_of_another_width_is_refused(make_job):
    with refused(r"local: extractor 'lenet5' .*; choose"):
        make_job("local", {"extractors": ["lenet5"]}, {**DIGITS, "input": [1, 28, 28]}).document()
