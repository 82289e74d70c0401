"""Signals that stop a run."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from stacked_remat.training import Interrupted, StopSignals, processes, signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_to_stop_and_handlers_are_put_back(number):
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == signal.Signals(number).name
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_there_is_anything_to_save_a_signal_ends_the_work_at_once(number):
    with StopSignals(at_once=True) as stop:
        with pytest.raises(Interrupted, match=signal.Signals(number).name):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)  # a second one of these acts already
    with StopSignals(at_once=True) as stop:
        stop.defer()
        os.kill(os.getpid(), number)
        assert stop.received == signal.Signals(number).name


def test_a_wait_for_other_processes_ends_by_a_signal_that_does_not_interrupt_it():
    ended, too_late = threading.Event(), []

    def wait_for_others():
        time.sleep(0.2)  # the main thread waits
        # To this thread, which doesn't interrupt the main thread's wait; neither does a
        # signal that comes just before the wait begins.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        if not ended.wait(10):
            too_late.append(True)

    with StopSignals(at_once=True), pytest.raises(Interrupted, match="SIGTERM"):
        processes._in_thread(wait_for_others)
    ended.set()
    assert not too_late


def test_a_second_interrupt_ends_the_process_even_inside_a_call_that_runs_no_handlers():
    program = """if True:
        import hashlib, importlib.util, os, signal, sys
        # The module alone, which is quick.
        spec = importlib.util.spec_from_file_location("signals", sys.argv[1])
        signals = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(signals)
        with signals.StopSignals():
            os.kill(os.getpid(), signal.SIGINT)
            print(flush=True)
            # Like XLA's compiler, for minutes.
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
    """
    with subprocess.Popen(
        [sys.executable, "-c", program, signals.__file__], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT
