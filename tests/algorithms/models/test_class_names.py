import pytest

from staddle.algorithms.models.class_names import LONGEST, names_differ, names_fault


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["a"], "names has 1 names, model.classes says 2 classes; give one name per class"),
        (["a", "b", "c"], "names has 3 names, model.classes says 2 classes"),
        ([], "names has 0 names, model.classes says 2 classes"),
        (["a", "a"], "classes 0 and 1 are both named 'a'; name them apart"),
        (["caf\u00e9", "cafe\u0301"], "classes 0 and 1 are both named"),
        (["a", ""], "class 1 is named ''"),
        (["a", " b"], "class 1 is named ' b'"),
        (["a\n", "b"], "class 0 is named 'a"),
        (["a", "b\x1bc"], "class 1 is named 'b"),
        (["a", "b" * (LONGEST + 1)], "class 1 is named 'bb"),
    ],
)
def test_names_that_cannot_name_classes(names, complaint):
    assert complaint in names_fault(names, 2, "names", "model.classes")


def test_names_that_can():
    assert names_fault(["benign", "malignant, grade Ⅲ"], 2, "names", "classes") == ""
    assert names_fault(["b" * LONGEST], 1, "names", "classes") == ""


@pytest.mark.parametrize(
    ("job", "data", "complaint"),
    [
        (["a", "b", "c"], ["a", "c", "b"],
            "class 1 is 'b' in the job and 'c' here; reorder y and class_names as the"),
        (["a", "b", "c"], ["a", "x", "y"],
            "class 1 is 'b' in the job and 'x' here; rename it, or have the job changed"),
        (["a", "b"], ["A", "b"], "class 0 is 'a' in the job and 'A' here; rename it"),
    ],
)  # fmt: skip
def test_the_first_class_that_differs_is_named(job, data, complaint):
    assert names_differ(job, data).startswith(complaint)


def test_two_spellings_of_one_letter_do_not_differ():
    assert names_differ(["caf\u00e9", "b"], ["cafe\u0301", "b"]) == ""
