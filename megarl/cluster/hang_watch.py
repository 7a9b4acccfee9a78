"""Watches whether the phases of a run end in time, and writes a page where one does not.

A thread of the controller does it, so that also a controller that waits for Ray itself is seen. The run goes on
meanwhile, and no report ends it.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from megarl.cluster.hang_evidence import ClusterView, collect
from megarl.cluster.processes import take_report_request
from megarl.diagnosis.culprit import culprit, named_culprit, seems_hung
from megarl.diagnosis.evidence import Evidence
from megarl.diagnosis.page import hang_page
from megarl.diagnosis.phases import Phase, PhaseClock
from megarl.diagnosis.stacks import answer_with_stacks
from megarl.disk import begin, has_ended
from megarl.printable import Say, describe_error

_POLL_S = 0.5
_AGAIN_S = 10.0  # what stands still for longer is no moment of a healthy phase
_BEFORE_END_S = 15.0  # for which the end of a run waits for a page
_FOLDER = "hangs"
_WRITE_S = 2.0  # for which the disk of the run may leave a page unwritten
_ELSEWHERE = "/tmp"
# how a line begins
_HANG = "HANG"
_SLOW = "SLOW"
_ASKED = "asked for by SIGUSR2"


class HangWatch:
    """Made by the cluster of a run, and ended with it. A phase has one page at most, besides those asked for
    and that of a run's end.
    """

    def __init__(
        self,
        phases: PhaseClock,
        folder: Path,
        say: Say,
        view: Callable[[], ClusterView],
        redacted: Callable[[str], str],
    ) -> None:
        """folder: of the run. view: of the cluster at this moment; it is called in another thread.

        redacted: takes the secrets out of a text.
        """
        self._phases = phases
        self._folder = folder / _FOLDER
        self._say = say
        self._view = view
        self._redacted = redacted
        self._reported: Phase | None = None
        # names of pages, also of the run before it was resumed: the disk is not asked while it may hang
        self._taken: set[str] = set()
        self._looked: tuple[Phase, int] | None = None  # at how many limits of a phase
        self._ended_by: tuple[str, Phase | None] | None = None
        self._last_page: threading.Thread | None = None
        # one report at a time, by whichever thread
        self._reporting = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang-watch", daemon=True)

    @property
    def folder(self) -> Path:
        """Of the pages."""
        return self._folder

    def start(self) -> None:
        answer_with_stacks()
        self._taken = {file.name for file in self._folder.glob("*.txt")}
        self._thread.start()

    def end(self) -> None:
        """It may be in the middle of a report, which asks Ray: wait for its end, and no longer than a report takes."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(_BEFORE_END_S)
        if self._last_page:
            # it may have waited for another report, and be about to write
            self._last_page.join(_WRITE_S)

    def before_end(self, problem: str, *, is_certain: bool = False) -> None:
        """Write the page before the run ends because of a process that hangs; returns soon, come what may.

        The same problem of a phase has one page, whoever tells it. is_certain: it names what is to blame.
        """
        phase = self._phases.current or self._phases.failed
        if self._ended_by == (problem, phase):
            return
        self._ended_by = (problem, phase)
        thread = threading.Thread(
            target=self._report,
            args=(problem, _HANG, phase),
            kwargs={"verdict": problem, "is_certain": is_certain},
            daemon=True,
        )
        self._last_page = thread
        thread.start()
        thread.join(_BEFORE_END_S)

    def _run(self) -> None:
        while not self._is_over.wait(_POLL_S):
            if take_report_request():
                self._report("SIGUSR2 asked for it", _ASKED, self._phases.current)
            phase = self._phases.overdue()
            if phase is None:
                continue
            limit_s = self._phases.limit_s(phase.name)
            reason = f"{phase} has lasted for longer than {limit_s:.0f} s"
            if self._phases.has_limit(phase.name):
                self._report_once(reason, _SLOW, phase)
            elif self._stands_still(phase):
                self._report_once(f"{reason} and stands still", _HANG, phase)

    def _stands_still(self, phase: Phase) -> bool:
        """Look twice at a phase whose usual length nobody knows, once each time its limit passes."""
        looked = (phase, self._phases.num_limits(phase))
        if phase == self._reported or looked == self._looked:
            return False
        self._looked = looked
        if not self._seems_hung(phase) or self._is_over.wait(_AGAIN_S):
            return False
        return self._seems_hung(phase)

    def _seems_hung(self, phase: Phase) -> bool:
        # what cannot be looked at is no reason for a page
        with suppress(Exception):
            evidence = collect(self._view(), "", phase)
            return self._phases.current == phase and seems_hung(evidence)
        return False

    def _report_once(self, reason: str, kind: str, phase: Phase) -> None:
        with self._reporting:
            # another report, which this one has waited for, may be that of its end
            if phase == self._phases.current and phase != self._reported:
                self._reported = phase
                self._make(reason, kind, phase)

    def _report(
        self,
        reason: str,
        kind: str,
        phase: Phase | None,
        verdict: str = "",
        is_certain: bool = False,
    ) -> None:
        with self._reporting:
            self._make(reason, kind, phase, verdict, is_certain)

    def _make(
        self,
        reason: str,
        kind: str,
        phase: Phase | None,
        verdict: str = "",
        is_certain: bool = False,
    ) -> None:
        """A page that cannot be made costs a line, and nothing else. verdict, is_certain: as of `Evidence`."""
        try:
            evidence = collect(self._view(), reason, phase)
            evidence = replace(evidence, verdict=verdict, is_certain=is_certain)
            if self._is_over.is_set() and not verdict:
                return
            file = self._new_file(phase)
            line = self._first_words(evidence, kind)
            # first: the disk may be what hangs
            self._say(self._redacted(f"{line}; the rest is in {file}"))
            self._write(file, self._redacted(hang_page(evidence)))
        except Exception as error:
            self._say(f"no page of a hang could be made: {describe_error(error)}")

    def _write(self, file: Path, page: str) -> None:
        """Into the run's folder, or elsewhere where its disk does not take it, as one that hangs does not."""
        writing = begin(partial(_write_page, file, page))
        if has_ended(writing, _WRITE_S) and writing.exception() is None:
            return
        descriptor, name = tempfile.mkstemp(".txt", f"megarl_{_FOLDER}_", _ELSEWHERE)
        with open(descriptor, "w", encoding="utf-8") as opened:
            opened.write(page)
        self._say(f"the disk of {self._folder} does not take the page, which is in {name}")

    def _first_words(self, evidence: Evidence, kind: str) -> str:
        """It says HANG where a cause is named, or where the run is about to end for one."""
        if kind == _ASKED:
            return f"{_ASKED}: {culprit(evidence)}"
        if line := named_culprit(evidence):
            return f"{_HANG}: {line}"
        phase = evidence.phase
        if kind == _HANG or phase is None:
            return f"{_HANG}: {evidence.reason}"
        longest_s = self._phases.longest_s(phase.name)
        before = "" if longest_s is None else f" (longest before: {longest_s:.0f} s)"
        return (
            f"{_SLOW}: {phase.name} has taken {evidence.seconds:.0f} s{before}; {culprit(evidence)}"
        )

    def _new_file(self, phase: Phase | None) -> Path:
        name = f"step_{phase.step}_{phase.name}" if phase else "between_phases"
        file = self._folder / f"{name}.txt"
        number = 2
        while file.name in self._taken:
            file = self._folder / f"{name}-{number}.txt"
            number += 1
        self._taken.add(file.name)
        return file


def _write_page(file: Path, page: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(page, encoding="utf-8")
