"""A progress bar on the terminal for long work before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LONG = 10_000  # items; fewer are done before a bar could be read


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """Yields a function to be called with the number of items done since the last call.

    The bar is on stderr and disappears at the end; where stderr is no terminal, the title is printed once.
    """
    console = Console(stderr=True)
    if total < _LONG:
        yield lambda _: None
    elif not console.is_terminal:
        console.print(title, markup=False, highlight=False, soft_wrap=True)
        yield lambda _: None
    else:
        text = TextColumn("{task.description}", markup=False)
        columns = text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, transient=True) as shown:
            task = shown.add_task(title, total=total)
            yield lambda done: shown.advance(task, done)
