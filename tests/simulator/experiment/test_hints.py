from staddle.simulator.experiment.hints import hint


def test_the_nearest_known_name_is_suggested_or_all_are_listed():
    assert hint("fedpr", ["local", "fedper"]) == "did you mean 'fedper'?"
    assert hint("zzz", ["local", "fedper"]) == "known: local, fedper"
