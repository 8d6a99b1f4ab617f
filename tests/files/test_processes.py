"""Processes of a server without threads, and the flag that they share."""

from staddle.files.processes import Flag, threadless


def raised(flag, shown):
    shown.send(flag.is_set())
    flag.set()
    shown.send(flag.is_set())


def test_a_flag_is_one_for_all_processes():
    context = threadless(__name__)
    flag = context.Event()
    assert isinstance(flag, Flag)
    here, there = context.Pipe()
    process = context.Process(target=raised, args=(flag, there))
    process.start()
    assert (here.recv(), here.recv()) == (False, True)
    process.join()
    assert flag.is_set()
    assert not context.Event().is_set()
