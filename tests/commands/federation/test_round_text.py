"""What an operator reads of a closed round: sums, what they say, and tables that are none."""

import numpy as np
import pytest

from staddle.commands.federation import jobs
from staddle.commands.federation.round_text import class_table, in_words, round_fields
from staddle.errors import PeerError
from staddle.proto import operations_pb2 as pb

SUMS = {"tested": 100, "correct.delivered": 90, "correct.trained": 93}


def closed(tables=(), noisy=False, sums=SUMS):
    round_ = pb.ClosedRound(round=3, members=["a", "b"], metrics=sums, noisy=noisy)
    for name, table in tables:
        whole = np.array(table)
        round_.tables.add(name=name, shape=whole.shape, counts=whole.reshape(-1).tolist())
    return round_


def tables(confusion, scores):
    for model in ("delivered", "trained"):
        yield f"confusion.{model}", confusion
        yield f"scores.{model}", scores


def test_a_line_and_a_table_say_what_the_sums_say():
    scores = [[[7, 0, 0], [10, 40, 43]]]
    (found,) = round_fields([closed(tables([[0, 7], [0, 93]], scores))])
    line = in_words(found)
    assert line.startswith("100 test records, 93.0% of one class; as delivered 90.0% right (")
    assert "; as trained 93.0% right (balanced 50.0%, AUROC 0.946 [0.892, 1.000], AUPRC " in line
    assert "calibration error " in line
    table = class_table(found)
    assert list(table.rows[1][:6]) == ["1", "93", "100.0%", "0.0%", "93.0%", "96.4%"]
    assert list(table.rows[0][2:6]) == ["0.0%", "100.0%", "-", "0.0%"]
    (plain,) = round_fields([closed()])
    assert class_table(plain) is None
    assert in_words(plain) == "100 test records; as delivered 90.0% right; as trained 93.0% right"


def test_noise_is_said_and_a_matrix_that_it_emptied_shows_no_classes():
    empty = {"confusion.delivered": [[0, 0], [0, 0]], "confusion.trained": [[3, -1], [0, -2]]}
    (found,) = round_fields([closed(empty.items(), noisy=True)])
    assert "100 test records (with noise, since the job is private)" in in_words(found)
    assert class_table(found) is None


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("confusion.trained", [1, 2]),
        ("confusion.trained", [[1, 2, 3], [1, 2, 3]]),
        ("scores.trained", [[1, 2], [3, 4]]),
        ("scores.trained", [[[1, 2], [3, 4], [5, 6]]]),
        ("confusion.other", [[1, 0], [0, 1]]),
        ("roc.trained", [[1, 0], [0, 1]]),
    ],
)
def test_tables_that_no_job_makes_are_the_coordinators_fault(name, table):
    with pytest.raises(PeerError, match=r"round 3 has a table .* which no job makes"):
        round_fields([closed([(name, table)])])


@pytest.mark.parametrize("trained", [[], [("confusion.trained", np.eye(3, dtype=np.int64))]])
def test_tables_of_both_models_have_one_shape(trained):
    given = [("confusion.delivered", np.eye(2, dtype=np.int64)), *trained]
    with pytest.raises(PeerError, match=r"round 3 has tables 'confusion' of shapes \(2, 2\) and"):
        round_fields([closed(given)])


def test_a_table_with_too_few_counts_is_refused():
    short = closed([("confusion.trained", [[1, 0], [0, 1]])])
    del short.tables[0].counts[2:]
    with pytest.raises(PeerError, match="of shape \\(2, 2\\) and 2 counts"):
        round_fields([short])


@pytest.mark.parametrize("sums", [{}, {"tested": 5}, {"tested": -1}, {"tested": 0}])
def test_sums_that_lack_something_raise_nothing(sums):
    (found,) = round_fields([closed(sums=sums)])
    assert in_words(found)


def test_a_line_of_a_job_names_who_declined():
    status = pb.JobStatus(
        job="one", stage="round", rounds=2, answers={"b": "DATA", "a": "accepted"}
    )
    line = jobs._line(status)
    assert "declined by b (DATA" in line
    assert line.endswith("their own logs say why")
    del status.answers["b"]
    assert "declined" not in jobs._line(status)
