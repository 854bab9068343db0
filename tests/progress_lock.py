"""The lock under which progress bars are drawn, which tqdm makes for all processes and never gives back for others."""

import threading

from tqdm import tqdm


def take_own_progress_lock() -> None:
    """Give every kind of bar a lock of this process, which nobody holds.

    Whoever is killed or interrupted while a bar is drawn leaves the lock taken, and the next to draw one, in whatever
    thread or process shares it, waits for ever.
    """
    lock, classes = threading.RLock(), [tqdm]
    for bar in classes:
        classes += bar.__subclasses__()
        bar.set_lock(lock)
