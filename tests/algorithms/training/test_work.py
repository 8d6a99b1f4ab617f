from staddle.algorithms.course import Change, Optimiser, Stage, Survey
from staddle.algorithms.training.work import LocalWork, work_of


def stage(*trains, epochs=2, whole=False, last=None):
    return Stage(trains, epochs, None, Optimiser(0.1), full_batch=whole, last=last)


def test_a_course_is_its_steps_and_the_records_that_pass():
    """20 records in batches of 8 are three steps; only the second stage fills up its last batch."""
    one, other = stage("extractor", "classifier"), stage("classifier", epochs=1)
    course = (one, Change(None), Survey(None), other, stage("own", epochs=3, whole=True))
    found = work_of(course, 20, 8, lambda stage: stage is other, measured=True)
    names = (
        "measure", "extractor+classifier x 2", "survey", "classifier x 1", "own x 3 whole",
    )  # fmt: skip
    assert found == LocalWork(2 * 3 + 3 + 3, 20 + 2 * 20 + 20 + 24 + 3 * 20, names)


def test_a_census_is_no_work():
    assert work_of((), 20, 8, lambda _: True, measured=False) == LocalWork(0, 0, ())


def test_what_is_dropped_is_no_work():
    course = (stage("extractor", last="drop"), stage("extractor", last="keep"))
    found = work_of(course, 17, 8, lambda _: True, measured=False)
    assert (found.steps, found.records) == (2 * 2 + 2 * 2, 2 * 16 + 2 * 16)
