"""Signals are noticed during all that the main thread does; those that are ignored stay ignored."""

import os
import signal
import subprocess
import sys
import time

import pytest

from linvit.io import signals
from linvit.io.signals import SIGNALS, STOP

BY = signal.SIGTERM


@pytest.fixture
def exits(monkeypatch):
    """How the process would have ended at once."""
    found = []
    monkeypatch.setattr(STOP, "exit_now", lambda code, message="": found.append((code, message)))
    yield found
    STOP.release()


def wait_until(condition):
    """Waits for the thread that notices signals."""
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


@pytest.mark.parametrize("by", SIGNALS)
def test_at_first_it_ends_the_process_at_once(exits, by):
    with STOP.caught():
        signal.raise_signal(by)
        wait_until(lambda: exits)
    assert exits == [(130, "ended by Ctrl-C")] if by == signal.SIGINT else [(143, f"ended by {by.name}")]


def test_a_run_that_can_save_is_left_to_do_so_unless_a_second_comes(exits, monkeypatch):
    with STOP.caught():
        STOP.deferred = True
        signal.raise_signal(BY)
        wait_until(lambda: STOP.received == BY)
        signal.raise_signal(BY)  # at the same time, as from `timeout`
        time.sleep(0.05)
        assert exits == []
        monkeypatch.setattr(signals, "SAME", 0)
        signal.raise_signal(signal.SIGINT)
        wait_until(lambda: exits)
    assert exits == [(130, "ended at once by a second Ctrl-C, without saving")]


def test_a_signal_after_the_end_does_not_change_the_exit_code(exits):
    """A launcher sends SIGTERM to the ranks that are left when one has ended after Ctrl-C."""
    with STOP.caught():
        STOP.deferred = True
        STOP.agree(signal.SIGINT)
        STOP._noticed -= 60
        STOP.ended_by = signal.SIGINT
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: exits)
    assert exits == [(130, "")]


def test_a_signal_to_another_rank_is_one_to_this(exits):
    with STOP.caught():
        STOP.deferred = True
        STOP.agree(BY)
    signal.raise_signal(signal.SIGINT)  # a little later; it would end this process if it were not caught any more
    time.sleep(0.05)
    assert (STOP.received, exits) == (BY, [])


def test_handlers_are_given_back_unless_a_signal_is_about_to_end_the_process(exits):
    before = [signal.getsignal(by) for by in SIGNALS]
    with STOP.caught():
        assert [signal.getsignal(by) for by in SIGNALS] != before
    assert [signal.getsignal(by) for by in SIGNALS] == before
    with STOP.caught():
        STOP.deferred = True
        signal.raise_signal(BY)
        wait_until(lambda: STOP.received == BY)
    signal.raise_signal(BY)  # would end this process
    STOP.release()
    assert [signal.getsignal(by) for by in SIGNALS] == before


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(BY, signal.SIG_IGN)
    try:
        with STOP.caught():
            assert signal.getsignal(BY) == signal.SIG_IGN
    finally:
        signal.signal(BY, before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_has_the_signals_to_itself(exits):
    with STOP.caught():
        pid = os.fork()
        if pid == 0:
            signal.raise_signal(BY)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -BY
    assert exits == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an unlocked mutex is not all zeros")
def test_it_ends_while_the_main_thread_waits_in_foreign_code():
    code = (
        "import ctypes\nfrom linvit.io.signals import STOP\n"
        "lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)\n"
        "with STOP.caught():\n    lock(mutex)\n    print('ready', flush=True)\n    lock(mutex)\n"  # for ever
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(BY)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 143
    assert error == "\nlinvit: ended by SIGTERM\n"
