"""The command line: Hydra composes, points run, the exit code follows from their rows. Imports no torch."""

from __future__ import annotations

import errno
import inspect
import io
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path

import hydra

from lowvram.cli import hydra_hooks
from lowvram.cli.call import Call
from lowvram.cli.closing import close_run, close_sweep, show_sweep
from lowvram.cli.errors import sentence, sorted_words, with_presets
from lowvram.cli.initial import with_initial, with_transformed
from lowvram.cli.program import note_program
from lowvram.cli.resume import moved, with_resumed
from lowvram.cli.swept_fields import with_fields_of_swept
from lowvram.compat.threads import start_or_fail
from lowvram.config import memory_limits, thread_limits
from lowvram.config.compose import MISTAKES, config_path
from lowvram.config.exit_codes import EXIT_FAILED, EXIT_REFUSED
from lowvram.config.identity import name_device
from lowvram.config.secret import learn, text_without_secrets
from lowvram.config.words import typed_value
from lowvram.launch.last_resort import last_resort
from lowvram.launch.launcher import note_token
from lowvram.launch.stop import stop_signals
from lowvram.launch.torchrun import aside, end_with_agent, is_ended_with_first, launch_from
from lowvram.results.terminal import progress_for, tell, terminal_restored
from lowvram.runs.folders import end_runs

PRINTING = ("--cfg", "-c", "--info", "-i")  # flags with which Hydra prints and runs nothing
LINGER_S = 10.0  # see `linger`
DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def main() -> None:
    """`python train.py …` and `lowvram …`."""
    logging.raiseExceptions = False  # if the disk is full, W&B's own log files fail too; the row says it
    start_or_fail()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    note_program()
    note_token()
    launch = launch_from()
    end_with_agent()
    with terminal_restored(), aside(launch) as folder:
        stop_signals.listen()
        call = Call(progress_for(sys.stdout))
        with last_resort.watching():
            code = run_call(call, sys.argv[1:], folder, wants_traceback)
            if code and launch is not None and not launch.records and is_ended_with_first(launch):
                linger()
    for ending in call.endings.values():
        if ending.error is not None:
            raise ending.error  # with its traceback, for which process=inline is meant
    sys.exit(code)


def run_call(call: Call, words: list[str], aside: Path | None, wants_traceback: bool) -> int:
    """From the words to the exit code."""
    learn({})  # the secrets of the environment, which a refused word may hold
    try:
        through_hydra(call, words, aside)
        code = close_sweep(call, words) if call.sweep else close_run(call.endings.values(), launch_from(), words)
        sys.stdout.flush()
        return code
    except MISTAKES as error:
        if is_out_of_memory(error):
            return failed(error)
        show_sweep(call, words) if call.sweep else end_runs(is_refused=True)  # keep the results so far
        if wants_traceback:
            raise
        tell(sentence(error), sys.stderr)
        return EXIT_REFUSED
    except Exception as error:
        if call.sweep and isinstance(error, OSError):
            with suppress(OSError):
                show_sweep(call, words)
        return failed(error)
    finally:
        let_go(call)


def let_go(call: Call) -> None:
    """Stop what works for the call, and unlock its folders. Where even this gets no memory, the end of the process
    does it: the reason is told already."""
    for end in (call.here.stop, lambda: name_device(None), lambda: end_runs(is_refused=False)):
        with suppress(MemoryError):
            end()
    if call.sweep:
        with suppress(MemoryError):
            call.sweep.release()


def failed(error: Exception) -> int:
    """Tell what the machine refused, and return the exit code. Raises other errors again."""
    if isinstance(error, OSError | RuntimeError) and thread_limits.is_cause_of(error):
        tell(f"{thread_limits.limits()}: nothing was run", sys.stderr)
        return EXIT_FAILED
    if is_out_of_memory(error):
        tell(
            "this program gets no more memory (ulimit -v, ulimit -d, or the machine has none): it can't go on",
            sys.stderr,
        )
        return EXIT_FAILED
    refused = error if isinstance(error, OSError) else error.__context__  # Hydra makes other errors of some
    if not isinstance(refused, OSError):
        raise error
    tell(told(refused), sys.stderr)
    return EXIT_FAILED if refused.errno in DISK_TROUBLE else EXIT_REFUSED


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this process got no more memory, also if libraries, such as Hydra's, have made other errors of it. Some
    of Python's own functions then fail without saying why."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError) or memory_limits.is_hidden_in(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def told(error: OSError) -> str:
    """What can't be read or written, and why: the disk is full, there is no permission or no such folder."""
    name = error.filename
    if name is None and error.errno == errno.ENOENT:
        return "the folder in which this was started is gone: change into another one"
    if isinstance(name, str) and is_unreadable_code(name):
        return f"{name}: can't be read ({error.strerror}): this user needs the right to read all packages"
    return f"{name or 'the results'}: can't be written ({error.strerror})"


def is_unreadable_code(name: str) -> bool:
    """Whether a file is one of a package's that this user may not read."""
    return name.endswith((".py", ".pyc", ".so", ".yaml")) and not os.access(name, os.R_OK)


def through_hydra(call: Call, words: list[str], aside: Path | None) -> None:
    """Hand the words to Hydra, which calls back with each composed point.

    Args:
        aside: the run's folder in a program of torchrun that doesn't record the results.

    Raises:
        The error in the words, or that of a point which ends the call.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions come up to us, instead of a print and exit(1)
    words = with_presets(words)
    if (resumed := typed_value(words, "resume")) is not None:
        words = with_resumed(words, resumed)
    words = with_initial(with_transformed(words))
    if aside is not None:
        words = moved(words, aside)
    typed, sys.argv = sys.argv, [sys.argv[0], *with_fields_of_swept(sorted_words(words))]
    # From 1.4 on Hydra requires a list of what it may instantiate.
    trust = (
        {"execution_whitelist": ["lowvram.*"]}
        if "execution_whitelist" in inspect.signature(hydra.main).parameters
        else {}
    )
    try:
        with secrets_hidden(words):
            hydra.main(version_base="1.3", config_path=config_path(), config_name="config", **trust)(call)()
    except hydra_hooks.NotBegun as ended:
        raise ended.mistake from None
    finally:
        call.leave_hydra()
        sys.argv = typed  # what is printed as a command starts with it
    if call.refusal is not None:
        raise call.refusal


@contextmanager
def secrets_hidden(words: list[str]) -> Iterator[None]:
    """Inside, what Hydra itself prints of a configuration (--cfg, --info) is printed without secrets, at the end."""
    if set(words).isdisjoint(PRINTING):
        yield
        return
    text = io.StringIO()
    try:
        with redirect_stdout(text):
            yield
    finally:
        print(text_without_secrets(text.getvalue(), is_config=True), end="")


def linger() -> None:
    """Who started the programs ends all once one fails: wait, so that the one that records the reason fails first."""
    deadline = time.monotonic() + LINGER_S
    while not stop_signals() and time.monotonic() < deadline:
        time.sleep(0.05)
