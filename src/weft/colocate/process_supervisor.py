"""What starts a job's process, and starts it again where it dies or hangs: the thread that launches queries never does.

Started as `python -m weft.colocate.process_supervisor`, with one line of JSON. It ends when the job has ended, when it
was told to stop, when a life after the other dies without a unit, or with the process that started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from weft.colocate.process_words import ProcessTask, Words
from weft.colocate.process_worker import RAISED
from weft.colocate.told_process import task_of, tell

COMMAND = (sys.executable, "-m", "weft.colocate.process_worker")
LOOK_S = 0.002
MOST_BARREN = 3
"""Lives in a row that did or saved no unit that none before them did, behind which it is not started again."""
STOP_S = 60.0
"""Within which a unit under way ends and is saved, once it was told to stop."""


@final
class Supervisor:
    """One job's."""

    def __init__(self, task: ProcessTask, words: Words, command: Sequence[str] = COMMAND) -> None:
        self._task, self._words, self._command = task, words, tuple(command)
        self._parent = os.getppid()

    def run(self) -> None:
        """Until the job has ended, or is given up."""
        words, barren, most = self._words, 0, (self._task.first, self._task.first)
        for life in range(1, 1 << 31):
            words.say("lives", life)
            if (status := self._life(life)) is None or status == 0:
                return
            units, saved = words.word("units"), words.kept()
            barren = barren + 1 if units <= most[0] and saved <= most[1] else 0
            most = max(most[0], units), max(most[1], saved)
            words.say("lost", words.word("lost") + max(0, units - saved))
            if words.word("stop"):
                return
            if barren >= MOST_BARREN:
                if words.word("raised") != life:
                    words.tell(f"its process ended {_status(status)} {barren} times without a further unit")
                words.say("failed", 1)
                return

    def _life(self, life: int) -> int | None:
        """From its start to its end: the exit status; None: nobody is there any more."""
        words, task = self._words, replace(self._task, life=life)
        process = subprocess.Popen(list(self._command), stdin=subprocess.PIPE, pass_fds=(task.fd,))
        words.say("pid", process.pid)
        words.say("alive", 1)
        tell(process, task)
        try:
            return self._watched(process, life)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            words.say("alive", 0)

    def _watched(self, process: subprocess.Popen[bytes], life: int) -> int | None:
        words, task = self._words, self._task
        seen, since, stopped, ready = -1, time.monotonic(), 0.0, False
        while True:
            status = process.poll()
            if status is not None:
                return status
            if os.getppid() != self._parent:
                return None
            now = time.monotonic()
            begun, ended = words.word("begun"), words.word("ended")
            was_ready, ready = ready, words.word("ready") == life
            if ready and (not was_ready or ended != seen or begun == ended):
                seen, since = ended, now
            hangs = ready and begun > ended and now - since > task.hang_s
            late = not ready and now - since > task.start_s
            if words.word("stop"):
                stopped = stopped or now
            if hangs or late or words.word("kill") == life or (stopped and now - stopped > STOP_S):
                process.kill()
                return process.wait()
            time.sleep(LOOK_S)


def _status(status: int) -> str:
    if status == RAISED:
        return "because its function raised"
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with {status}"


def main(lines: Sequence[bytes] | None = None) -> None:
    """Read the task, and start the process."""
    task = task_of(ProcessTask, lines)
    words = Words(task.fd)
    try:
        Supervisor(task, words).run()
    except OSError as error:
        words.tell(f"its process cannot be started: {error}")
        words.say("failed", 1)


if __name__ == "__main__":
    main()
