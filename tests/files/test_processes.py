"""Processes of a server without threads, and the flag that they share."""

from support.flags import raised

from staddle.files.processes import Flag, threadless


def test_a_flag_is_one_for_all_processes():
    context = threadless("staddle.algorithms.data.lazy")
    flag = context.Event()
    assert isinstance(flag, Flag)
    here, there = context.Pipe()
    process = context.Process(target=raised, args=(flag, there))
    process.start()
    # So that nobody waits for a process that ended.
    there.close()
    assert (here.recv(), here.recv()) == (False, True)
    process.join()
    assert flag.is_set()
    assert not context.Event().is_set()
