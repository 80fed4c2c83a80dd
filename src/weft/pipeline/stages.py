"""Names, times, reports and dumps the stages of a compilation; all stages go through one call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from weft.errors import OptionError
from weft.kernels.record import CompileRecord, StageRecord
from weft.options import Options

P = ParamSpec("P")
R = TypeVar("R")
Say = Callable[[str, str], None]
"""Progress: (stage, one line). Called often; must be quick and must not raise."""


def silent(stage: str, line: str) -> None:
    """The default listener."""
    del stage, line


class Stages:
    """Runs stages in order and keeps what each one took and made."""

    def __init__(self, options: Options, say: Say = silent) -> None:
        self.options = options
        self.say = say
        self.records: list[StageRecord] = []

    def run(self, name: str, stage: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one stage; its result's `str` is dumped when `options.dump_dir` is set."""
        with self.timed(name):
            result = stage(*args, **kwargs)
        if self.options.dump_dir is not None:
            self._dump(self.options.dump_dir, name, result)
        return result

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """The block is a stage that makes nothing."""
        self.say(name, "")
        start = time.perf_counter()
        try:
            yield
        finally:  # one that was given up took its time as well
            self.records.append(StageRecord(name, time.perf_counter() - start, ""))

    def close(self, record: CompileRecord) -> CompileRecord:
        """The record with all stages up to now."""
        return replace(record, stages=tuple(self.records), seconds=sum(s.seconds for s in self.records))

    def seconds(self, name: str) -> float:
        """What a stage took, 0 if it was none."""
        return sum(s.seconds for s in self.records if s.name == name)

    def note(self, detail: str) -> None:
        """One line about the stage that just ended."""
        last = self.records[-1]
        self.records[-1] = StageRecord(last.name, last.seconds, detail)
        self.say(last.name, detail)

    def _dump(self, folder: Path, name: str, result: object) -> None:
        path = folder / f"{len(self.records):02d}-{name.replace(' ', '-')}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(str(result))
        except OSError as error:
            raise OptionError(option="dump_dir", problem=f"{path} cannot be written: {error.strerror}") from None
