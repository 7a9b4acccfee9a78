"""Runs in workers of tests."""

import threading


class Idle:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def hang(self) -> None:
        threading.Event().wait()
