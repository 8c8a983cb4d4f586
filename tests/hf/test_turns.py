"""The lock that is handed over in order of arrival."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from ckpt_hf.turns import TurnLock


def test_only_one_thread_holds_it_and_may_take_it_again() -> None:
    lock, inside, most = TurnLock(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with lock, lock:
                assert lock.held
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, inside, lock.held) == (1, 0, False)


def test_a_thread_that_takes_it_again_at_once_waits_behind_those_that_came_before() -> None:
    lock, order, arrived = TurnLock(), [], threading.Event()

    def other() -> None:
        arrived.set()
        with lock:
            order.append("other")

    thread = threading.Thread(target=other)
    with lock:
        thread.start()
        arrived.wait(10)
        while not lock._turns:  # until it waits
            time.sleep(0.001)
    with lock:
        order.append("again")
    thread.join()
    assert order == ["other", "again"]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
def test_an_interrupt_while_waiting_leaves_the_lock_to_the_others() -> None:
    lock, main = TurnLock(), threading.main_thread()
    release, taken = threading.Event(), threading.Event()

    def holder() -> None:
        with lock:
            taken.set()
            while not lock._turns:
                time.sleep(0.001)
            signal.pthread_kill(main.ident or 0, signal.SIGINT)
            release.wait(10)

    thread = threading.Thread(target=holder)
    thread.start()
    taken.wait(10)
    with pytest.raises(KeyboardInterrupt):
        lock.__enter__()
    assert not lock.held
    release.set()
    thread.join()
    with lock:
        assert lock.held
