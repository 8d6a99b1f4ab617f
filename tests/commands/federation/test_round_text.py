"""What an operator reads of a closed round: sums, what they say, and tables that are none."""

import numpy as np
import pytest

from staddle.algorithms.job.evaluated import evaluation_of
from staddle.algorithms.tasks.value_counting import UNIT
from staddle.commands.federation import jobs
from staddle.commands.federation.round_text import class_table, in_words, reading, round_fields
from staddle.errors import PeerError
from staddle.files.documents import canonical_json
from staddle.proto import operations_pb2 as pb

SUMS = {"tested": 100, "correct.delivered": 90, "correct.trained": 93}
CLASSES = {"model": {"classes": 2}, "metrics": {"confusion": True, "score_bins": 3}}
DAYS = {"task": {"kind": "regression", "range": ["0.0", "10.0"], "unit": "days"}}
SURVIVAL = {"task": {"kind": "survival", "cuts": ["1.0", "2.0"]}, "model": {"outputs": 2}}
LABELS = {
    "task": {"kind": "multilabel"},
    "model": {"classes": 2, "class_names": ["nodule", "effusion"]},
    "metrics": {"confusion": True},
}
OTHERS = {"task": {"kind": "ranking", "depth": 3}, "model": {"outputs": 2}}


def closed(tables=(), noisy=False, sums=SUMS):
    round_ = pb.ClosedRound(round=3, members=["a", "b"], metrics=sums, noisy=noisy)
    for name, table in tables:
        whole = np.array(table)
        round_.tables.add(name=name, shape=whole.shape, counts=whole.reshape(-1).tolist())
    return round_


def report(*rounds, job=CLASSES):
    return pb.JobReport(rounds=rounds, evaluation=canonical_json(evaluation_of(job)))


def said(round_, job=CLASSES):
    """The fields of a job's only round, its line and its table."""
    told = report(round_, job=job)
    (found,) = round_fields(told)
    known = reading(told)
    return found, in_words(found, known), class_table(found, known)


def tables(confusion, scores):
    for model in ("delivered", "trained"):
        yield f"confusion.{model}", confusion
        yield f"scores.{model}", scores


def test_a_line_and_a_table_say_what_the_sums_say():
    scores = [[[7, 0, 0], [10, 40, 43]]]
    _, line, table = said(closed(tables([[0, 7], [0, 93]], scores)))
    assert line.startswith("100 test records; as delivered accuracy 90.0%, balanced 50.0%, AUROC ")
    trained = "; as trained accuracy 93.0%, balanced 50.0%, AUROC 0.946 [0.892, 1.000], AUPRC "
    assert trained in line
    assert line.count("calibration error ") == 2
    assert line.endswith("; the same answer for all 93.0%")
    assert list(table.rows[1][:6]) == ["1", "93", "100.0%", "0.0%", "93.0%", "96.4%"]
    assert list(table.rows[0][2:6]) == ["0.0%", "100.0%", "-", "0.0%"]
    _, line, table = said(closed())
    assert table is None
    assert line == "100 test records; as delivered accuracy 90.0%; as trained accuracy 93.0%"


def test_classes_and_labels_that_have_names_are_called_by_them():
    named = {**CLASSES, "model": {"classes": 2, "class_names": ["benign", "malignant"]}}
    _, _, table = said(closed(tables([[0, 7], [0, 93]], [[[7, 0, 0], [10, 40, 43]]])), named)
    assert [row[0] for row in table.rows] == ["benign", "malignant"]
    both = [[[6, 1], [1, 2]], [[5, 0], [0, 5]]]
    own = [(f"confusion.{model}", both) for model in ("delivered", "trained")]
    sums = {"tested": 10, "correct.delivered": 18, "correct.trained": 18}
    found, line, table = said(closed(own, sums=sums), LABELS)
    assert [list(row[:3]) for row in table.rows] == [
        ["nodule", "3", "66.7%"],
        ["effusion", "5", "100.0%"],
    ]
    assert found["measures"]["accuracy.trained"] == 0.9
    assert line == (
        "10 test records; as delivered label accuracy 90.0%, balanced 88.1%; as trained label"
        " accuracy 90.0%, balanced 88.1%; the same answer for all 60.0%"
    )


def test_a_regression_is_told_in_its_unit():
    sums = {"tested": 4}
    sums |= {"absolute.delivered": 2 * UNIT, "squared.delivered": UNIT}
    sums |= {"absolute.trained": UNIT, "squared.trained": UNIT // 4}
    found, line, table = said(closed(sums=sums), DAYS)
    assert line == (
        "4 test records; as delivered MAE 5 days, RMSE 5; as trained MAE 2.5 days, RMSE 2.5"
    )
    assert found["measures"] == {
        "mae.delivered": 5, "rmse.delivered": 5, "mae.trained": 2.5, "rmse.trained": 2.5,
    }  # fmt: skip
    assert table is None
    sums |= {"targets.target": 2 * UNIT, "targets.target_squared": 3 * UNIT // 2}
    assert said(closed(sums=sums), DAYS | {"metrics": {"targets": True}})[1] == (
        "4 test records; as delivered MAE 5 days, RMSE 5, R² -1; as trained MAE 2.5 days, RMSE 2.5,"
        " R² 0.5"
    )


def test_survival_is_told_by_its_loss_and_with_its_table_by_concordance():
    sums = {"tested": 4, "loss.delivered": UNIT // 8, "loss.trained": UNIT // 16}
    assert said(closed(sums=sums), SURVIVAL)[1] == (
        "4 test records; as delivered loss 1; as trained loss 0.5"
    )
    # who had the event first has the highest risk
    risks = np.zeros((2, 3, 4), int)
    risks[1, 0, 3] = risks[1, 1, 2] = risks[0, 2, 0] = risks[0, 2, 1] = 1
    both = [("risks.delivered", risks[:, :, ::-1]), ("risks.trained", risks)]
    asked = SURVIVAL | {"metrics": {"risk_bins": 4}}
    assert said(closed(both, sums=sums), asked)[1] == (
        "4 test records; as delivered C-index 0.000 [0.000, 0.000], loss 1; as trained"
        " C-index 1.000 [1.000, 1.000], loss 0.5"
    )


def test_the_sums_of_another_projects_task_are_shown_as_they_are():
    found, line, table = said(closed([("places.trained", [1, 2, 3])]), OTHERS)
    assert found["metrics"] == {**SUMS, "places.trained": [1, 2, 3]}
    assert found["measures"] == {}
    why = "its task or a metric is of an installed package"
    assert line == f"100 test records; {why}: --json has the sums"
    assert table is None
    short = closed([("places.trained", [1, 2, 3])])
    del short.tables[0].counts[2:]
    with pytest.raises(PeerError, match=r"of shape \(3,\) and 2 counts"):
        round_fields(report(short, job=OTHERS))
    assert said(closed(sums={}), OTHERS)[1] == "the silos keep their test counts to themselves"


def test_metrics_of_torchmetrics_stand_after_the_others():
    asked = CLASSES | {"metrics": {"torchmetrics": [{"name": "BinaryCohenKappa", "title": "k"}]}}
    states = [(f"torchmetrics.{model}", [40, 10, 20, 30]) for model in ("delivered", "trained")]
    found, line, _ = said(closed(states), asked)
    assert line.count(", k 0.4") == 2
    assert found["measures"]["torchmetrics.k.trained"] == pytest.approx(0.4)
    with pytest.raises(PeerError, match="which the job does not make"):
        round_fields(report(closed([("torchmetrics.trained", [1, 2])]), job=asked))


def test_noise_is_said_and_a_matrix_that_it_emptied_shows_no_classes():
    empty = {"confusion.delivered": [[0, 0], [0, 0]], "confusion.trained": [[3, -1], [0, -2]]}
    _, line, table = said(closed(empty.items(), noisy=True), {**CLASSES, "privacy": {}})
    assert "100 test records (with noise, since the job is private)" in line
    assert table is None


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("confusion.trained", [1, 2]),
        ("confusion.trained", [[1, 2, 3], [1, 2, 3]]),
        ("confusion.trained", np.eye(3, dtype=np.int64)),
        ("confusion.trained", [[[1, 0], [0, 1]], [[1, 0], [0, 1]]]),
        ("scores.trained", [[1, 2], [3, 4]]),
        ("scores.trained", [[[1, 2], [3, 4], [5, 6]]]),
        ("scores.trained", [[[1, 2], [3, 4]]]),
        ("scores.trained", [[[1, 2, 3], [3, 4, 5]]] * 2),
        ("confusion.other", [[1, 0], [0, 1]]),
        ("confusion", [[1, 0], [0, 1]]),
        ("roc.trained", [[1, 0], [0, 1]]),
        ("risks.trained", [[[1, 2, 3], [3, 4, 5]]]),
        ("metrics.tested", 100),
    ],
)
def test_tables_that_the_job_does_not_make_are_the_coordinators_fault(name, table):
    with pytest.raises(PeerError, match=r"round 3 has a table .* which the job does not make"):
        round_fields(report(closed([(name, table)])))


@pytest.mark.parametrize("job", [{"model": {"classes": 2}}, DAYS, SURVIVAL])
def test_a_job_that_asked_for_no_table_has_none(job):
    with pytest.raises(PeerError, match=r"round 3 has a table 'confusion\.trained' .* not make"):
        round_fields(report(closed([("confusion.trained", [[1, 0], [0, 1]])]), job=job))


def test_a_table_of_one_model_alone_says_nothing_of_the_other():
    alone = closed([("confusion.delivered", [[40, 10], [0, 50]])])
    found, line, table = said(alone)
    assert "balanced_accuracy.delivered" in found["measures"]
    assert "balanced_accuracy.trained" not in found["measures"]
    assert line.endswith("; as trained accuracy 93.0%")
    assert table is None


def test_a_table_with_too_few_counts_is_refused():
    short = closed([("confusion.trained", [[1, 0], [0, 1]])])
    del short.tables[0].counts[2:]
    with pytest.raises(PeerError, match="of shape \\(2, 2\\) and 2 counts"):
        round_fields(report(short))


@pytest.mark.parametrize("sums", [{}, {"tested": 5}, {"tested": -1}, {"tested": 0}])
@pytest.mark.parametrize("job", [CLASSES, LABELS, DAYS, SURVIVAL, OTHERS])
def test_sums_that_lack_something_raise_nothing(sums, job):
    assert said(closed(sums=sums), job)[1]


@pytest.mark.parametrize(
    "evaluation",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"task":{"kind":"classification"}}',
        b'{"metrics":{},"model":{"classes":1},"noised":false,"task":{"kind":"classification"}}',
        b'{"metrics":{},"model":{"classes":2},"noised":false,"task":{"kind":["classification"]}}',
        (
            b'{"metrics":{},"model":{"classes":2,"class_names":["a"]},"noised":false,"task":'
            b'{"kind":"classification"}}'
        ),
        (
            b'{"metrics":{},"model":{"outputs":2},"noised":false,"task":'
            b'{"kind":"regression","range":["0.0","1.0"]}}'
        ),
        b'{"metrics":{},"model":{},"noised":false,"task":{"kind":"regression","range":["1","0"]}}',
        b'{"metrics":{"more":1},"model":{},"noised":false,"task":{"kind":"classification"}}',
    ],
)
def test_a_coordinator_that_does_not_say_what_the_sums_are_is_told(evaluation):
    told = pb.JobReport(rounds=[closed()], evaluation=evaluation)
    for ask in (reading, round_fields):
        with pytest.raises(PeerError, match="does not say what the job's sums are as this release"):
            ask(told)


def test_a_line_of_a_job_names_who_declined():
    status = pb.JobStatus(
        job="one", stage="round", rounds=2, answers={"b": "DATA", "a": "accepted"}
    )
    line = jobs.status_line(status)
    assert "declined by b (DATA" in line
    assert line.endswith("its own log says why)")
    status.answers["b"] = "NOT_APPROVED"
    asked = "declined by b (NOT_APPROVED, a person there declined: ask the people there)"
    assert jobs.status_line(status).endswith(asked)
    del status.answers["b"]
    assert "declined" not in jobs.status_line(status)


def test_a_watched_job_names_who_is_awaited_and_why():
    status = pb.JobStatus(
        stage="admitting",
        silos=("a", "b", "c", "d", "e"),
        answers={"a": "accepted", "b": "WAITING", "c": "POLICY"},
        unheard=["e"],
    )
    said = "; awaited: b (people there have yet to decide: the policy has no rule for this job yet,"
    said += " or asks a person), d (not answered), e (not connected)"
    assert jobs._awaited(status) == said
    line = jobs.status_line(status, "; 0%")
    assert "declined by c (POLICY: its policy does not allow it" in line
    assert line.endswith(f"; 0%{said}")
    in_round = pb.JobStatus(
        stage="round",
        silos=status.silos,
        cohort=("a", "b", "c", "d"),
        given=["a"],
        failed={"b": "lost"},
        unheard=["d", "e"],
    )
    assert jobs._awaited(in_round) == "; awaited: c (training), d (not connected)"
    for stage in ("queued", "folding", "ended"):
        assert jobs._awaited(pb.JobStatus(stage=stage, silos=status.silos)) == ""


def test_a_watched_job_says_how_far_it_is_and_how_long_it_takes_still():
    pace = jobs.WatchedPace()
    at = lambda number, stage="round": pb.JobStatus(stage=stage, round=number, rounds=8)
    assert pace.told(at(2), 100.0) == "; 25%"  # no round was seen to close
    assert pace.told(at(2), 150.0) == "; 25%"
    assert pace.told(at(4), 160.0) == "; 50%, about 0:02:00 left"
    assert pace.told(at(7), 200.0) == "; 88%, about 0:00:20 left"
    assert pace.told(at(8, "ended"), 220.0) == ""
    hostile = pb.JobStatus(stage="round", round=3, rounds=2**32 - 1)
    assert "left" in pace.told(hostile, 1e9)


TABLE_NAMES = ("confusion", "scores", "risks", "targets.target", "roc")


@pytest.mark.parametrize("job", [CLASSES, LABELS, DAYS, SURVIVAL])
def test_numbers_under_the_names_of_tables_say_nothing(job):
    names = {f"{name}.trained": 3 for name in TABLE_NAMES} | {"targets.target": 5}
    plain, told = said(closed(), job=job), said(closed(sums=SUMS | names), job=job)
    assert told[1] == plain[1]
    assert (told[2], plain[2]) == (None, None)


@pytest.mark.parametrize(
    ("name", "shape", "counts"),
    [
        ("tested", (1,), [3]),
        ("own", (1,) * 9, [3]),
        ("own", (0, 2**32 - 1, 2**32 - 1), []),
        ("own", (), [3]),
        ("own", (2, 2), [1, 2, 3]),
    ],
)
def test_odd_tables_of_another_projects_task_are_refused(name, shape, counts):
    round_ = closed()
    round_.tables.add(name=name, shape=shape, counts=counts)
    with pytest.raises(PeerError, match="which the job does not make"):
        said(round_, job=OTHERS)


def test_an_evaluation_too_large_to_cross_is_refused_before_it_is_read():
    huge = {"model": {"classes": 100_000}, "metrics": {"confusion": True}}
    with pytest.raises(PeerError, match="does not say what the job's sums are"):
        said(closed(), job=huge)
