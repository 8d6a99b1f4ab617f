"""What the two lay pages say, and that they say no more than is known."""

from dataclasses import replace

import pytest
from support import report_ledgers as ledgers
from support.ledgers import BYTES, HASH, intend, open_ledger, private, write_job_accept
from support.report_ledgers import POLICY, RELEASES, contribute, sign

from staddle.algorithms.job.torchmetrics_counting import TORCHMETRICS
from staddle.algorithms.tasks.table_counting import CONFUSION, SCORES
from staddle.commands.report import report
from staddle.commands.report.first_pages import MOST_JOBS, MOST_TEXT, organisation, shortened
from staddle.commands.report.page import RosterSources
from staddle.security.ledger.records import Applied

MADE = "2026-11-21 17:30 UTC"
PURPOSE = "To find out who needs a second scan."


@pytest.fixture
def path(tmp_path):
    return tmp_path / "silo" / "ledger"


def read(path, only=""):
    return report.read(path, MADE, RosterSources(), only).first_pages


def of(path, job="j1", **privacy):
    """The lay words on a job of this ledger that was signed with this [privacy] table."""
    keys = {"privacy": {"epsilon": "8.0", "delta": "0.0001", **privacy}} if privacy else {}
    digest = sign(path.parent, job, purpose=PURPOSE, **keys)
    with open_ledger(path) as ledger:
        write_job_accept(ledger, job, digest, "operator-1")
    return next(found for found in read(path).jobs if found.job == job)


def test_an_exact_job_in_the_clear(path):
    with open_ledger(path) as ledger:
        contribute(ledger, "j1", dataset="scans")
    job = of(path)
    assert job.purpose == PURPOSE
    assert job.outcome == "this silo accepted it"
    assert job.records == (
        "Data set scans: 1,000 records to train on, 200 kept for tests. Records are counted, not"
        " persons."
    )
    assert job.left[0] == "the numbers of a whole trained model: 160 B in 1 message"
    assert job.readers == (
        "coordinator (organisation not known) reads this institution's own numbers",
    )
    assert job.protection == (
        (
            "No noise protects what left: whoever can read it may find out whether a record was"
            " used, or learn more."
        ),
        "Only the connection is encrypted: the readers above read the numbers themselves.",
    )
    assert job.budget == "Nothing was taken from a privacy budget."


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        ({"unit": "record"}, "Noise hides what each record adds; how well, epsilon says."),
        ({"clip": "1.0"}, "Noise hides what each record adds; how well, epsilon says."),
        (
            {"unit": "silo", "noise": "shared", "dishonest": 1},
            (
                "Noise hides the whole silo, what all records here add together; how well, epsilon"
                " says."
            ),
        ),
        ({}, "Noise was added. Whether it hides each record or the whole silo is not known: the"),
    ],
)
def test_noise_hides_what_the_signed_job_says(path, privacy, said):
    private(path)
    job = of(path, **privacy)
    assert job.protection[0].startswith(said)
    shared = "leave theirs out or tell it" in "".join(job.protection)
    assert shared == ("noise" in privacy)
    assert job.budget.startswith("It took from the budget of data set data.")
    assert ("at most 8.0 epsilon" in job.budget) == bool(privacy)


def test_the_job_of_another_digest_is_not_believed(path):
    with open_ledger(path) as ledger:
        write_job_accept(ledger, "j1", HASH, "operator-1")
        contribute(ledger, "j1")
    sign(path.parent, "j1", purpose="Something else.")
    (job,) = read(path).jobs
    assert job.purpose == "Not known: the signed job is not next to this ledger."


@pytest.mark.parametrize("name", ["job.json", "report.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"document":[]}', b'{"samples":"many"}'])
def test_damaged_files_next_to_the_ledger_say_nothing(path, name, content):
    digest = sign(path.parent, "j1", purpose=PURPOSE)
    with open_ledger(path) as ledger:
        write_job_accept(ledger, "j1", digest, "operator-1")
        contribute(ledger, "j1")
    (path.parent / "jobs" / "j1" / name).write_bytes(content)
    (job,) = read(path).jobs
    assert (job.purpose == PURPOSE) == (name == "report.json")
    assert ("1,000 records" in job.records) == (name == "job.json")


def test_names_of_jobs_lead_to_no_other_folder(path, tmp_path):
    digest = sign(tmp_path, "j1", purpose=PURPOSE)
    with open_ledger(path) as ledger:
        for job in ("../../jobs/j1", "..", "/j1"):
            write_job_accept(ledger, job, digest, "operator-1")
            contribute(ledger, job)
    assert {job.purpose for job in read(path).jobs} == {
        "Not known: the signed job is not next to this ledger."
    }


def test_a_purpose_that_was_not_stated(path):
    digest = sign(path.parent, "j1", purpose=None, privacy=None)
    with open_ledger(path) as ledger:
        write_job_accept(ledger, "j1", digest, "operator-1")
    (job,) = read(path).jobs
    assert job.purpose == "None was stated in the signed job."
    assert job.left == ()


def test_how_many_records_a_person_has_is_the_policys_word(path):
    text = POLICY + '[dataset.scans]\nunit = "record"\nepsilon = 8\ndelta = 0.0001\n'
    with open_ledger(path) as ledger:
        digest = ledgers.hashlib.sha256(f"{text}records_per_person = 3\n".encode()).hexdigest()
        ledger.put_in_force(digest, f"{text}records_per_person = 3\n")
        applied = Applied(file=digest, rule="x", decision="allow")
        contribute(ledger, "j1", dataset="scans", policy=applied)
    assert of(path).records.endswith("A person has at most 3 of them, says this silo's policy.")


def test_what_nobody_measured_stands_apart(path):
    with open_ledger(path) as ledger:
        contribute(ledger, "j1")
        intend(ledger, job="j1", round_number=1)
    pages = read(path)
    assert (pages.totals.bytes, pages.totals.assumed, pages.totals.messages) == (BYTES, BYTES, 1)
    (job,) = pages.jobs
    assert job.left[-1] == f"at most {BYTES} B more may have left, which nobody measured"


@pytest.mark.parametrize("part", [CONFUSION, SCORES, TORCHMETRICS])
def test_metrics_that_tell_how_many_records_each_class_has_are_said_to(path, part):
    tensor = replace(RELEASES[0], part=part, kind="metric")
    with open_ledger(path) as ledger:
        contribute(ledger, "j1", releases=(tensor,))
    assert of(path).left[0].startswith("how many test records of each class there are, and")


def test_what_was_computed_from_no_record_is_said_to_be_so(path):
    with open_ledger(path) as ledger:
        contribute(ledger, "j1", releases=RELEASES[1:2])
    job = of(path)
    assert job.left == (
        (
            "the numbers of a whole trained model, in a form that was computed from no records"
            " here, such as zeros: 16 B in 1 message"
        ),
    )
    assert job.protection[0] == "Nothing that left was computed from records here."


def test_many_jobs_stand_in_a_line_each_and_the_oldest_are_counted(path):
    pages = read(ledgers.crowded(path))
    assert [job.job[:2] for job in pages.jobs] == ["29", "28", "27"]
    assert len(pages.jobs) == MOST_JOBS
    assert [job[:2] for job, _ in pages.others.rows] == [f"{n}" for n in range(23, 27)]
    assert pages.others.left_out == 23
    assert len(pages.jobs[0].purpose) == MOST_TEXT
    assert pages.jobs[0].readers[-1] == "7 further readers: section 3"
    only = read(path, pages.jobs[2].job)
    assert [job.job for job in only.jobs] == [pages.jobs[2].job]


def test_an_organisation_is_named_and_who_runs_its_machines():
    class Entry:
        organisation, host_operator = "General Hospital", "Cloud Ltd"

    assert organisation("a", {"a": Entry()}) == ("General Hospital (a, on machines of Cloud Ltd)")
    Entry.host_operator = Entry.organisation
    assert organisation("a", {"a": Entry()}) == "General Hospital (a)"
    assert organisation("b", {"a": Entry()}) == "b (organisation not known)"


def test_long_texts_are_cut_and_show_what_would_not_be_seen():
    assert shortened("x" * 70) == "x" * 63 + "\u2026"
    assert shortened("a\n\tb\u202e") == r"a\n\tb\u202e"
