import os
import signal
import threading

import pytest

from stacked_remat.training import StopSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_to_stop_and_handlers_are_put_back(number):
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == signal.Signals(number).name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_interrupts():
    with StopSignals(), pytest.raises(KeyboardInterrupt):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)


def test_in_another_thread_nothing_is_handled():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter():
        with StopSignals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
