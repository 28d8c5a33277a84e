"""Ctrl-C during refits: the first one asks to stop, the second one is a KeyboardInterrupt."""

import signal
import threading

import pytest

from ssla.refit.interrupts import Interrupted


@pytest.fixture(autouse=True)
def _pythons_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_asks_and_the_second_interrupts():
    interrupted = Interrupted()
    with interrupted.listen():
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_comes_back_after_an_error():
    with pytest.raises(ZeroDivisionError), Interrupted().listen():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_own_stays():
    seen = []
    own = lambda number, frame: seen.append(number)
    signal.signal(signal.SIGINT, own)
    interrupted = Interrupted()
    with interrupted.listen():
        assert signal.getsignal(signal.SIGINT) is own
        signal.raise_signal(signal.SIGINT)
    assert seen == [signal.SIGINT]
    assert not interrupted()


def test_other_threads_change_nothing():
    found = []

    def work():
        with Interrupted().listen():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
