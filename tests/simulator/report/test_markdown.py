from staddle.simulator.report.markdown import MarkdownColumn, escaped, table


def test_a_table_has_its_numbers_on_the_right():
    made = table(
        [MarkdownColumn("method"), MarkdownColumn("macro", numbers=True)],
        [["fedavg", "9.50"], ["x", "100.00"]],
    )
    assert made.splitlines() == [
        "| method |  macro |", "| ------ | -----: |", "| fedavg |   9.50 |", "| x      | 100.00 |",
    ]  # fmt: skip


def test_what_others_named_is_text():
    assert escaped("a|b *c* <d>\n## e") == r"a\|b \*c\* \<d\> \#\# e"
