import os
import signal

import pytest

from staddle.errors import CancelledError
from staddle.simulator.engines.signals import StopSignal, stopping


def test_a_guarded_call_ends_at_once_and_no_other_begins():
    with stopping(signal.SIGTERM) as stop:
        went = []

        def call():
            went.append("before")
            os.kill(os.getpid(), signal.SIGTERM)
            went.append("after")

        with pytest.raises(CancelledError):
            stop.guard(call)
        with pytest.raises(CancelledError):
            stop.guard(call)
    assert went == ["before"]


def test_asked_again_it_lets_the_call_tidy_up():
    with stopping(signal.SIGTERM) as stop:
        tidied = []

        def call():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                tidied.append(True)

        with pytest.raises(CancelledError):
            stop.guard(call)
    assert tidied == [True]


def test_what_is_not_guarded_goes_on_to_its_end():
    with stopping(signal.SIGTERM, signal.SIGHUP) as stop:
        assert stop.guard(lambda: 7) == 7
        os.kill(os.getpid(), signal.SIGHUP)
        went = "after"
        with pytest.raises(CancelledError):
            stop.guard(lambda: 7)
    assert went == "after"


def test_signals_mean_what_they_did_before_and_raise_nothing_unguarded():
    before = signal.getsignal(signal.SIGTERM)
    with stopping(signal.SIGTERM):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    StopSignal().ask()
