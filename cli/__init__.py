"""The command `packer`: a click group whose commands are imported only when they are called."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time

try:
    import click

    from packer.cli.declare import LazyGroup
    from packer.cli.streams import fail, flush, last_words, prepare
    from packer.errors import PackerError, raised
except KeyboardInterrupt:  # before `run` can report it
    sys.exit(130)

COMPLETION = "_PACKER_COMPLETE"  # Environment variable by which a shell asks for completions.
STARTED = time.monotonic()  # Approximate start of the process.
cli = LazyGroup("packer", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
click.version_option(package_name="adapter-packer", prog_name="packer")(cli)


def command() -> None:
    """The command itself. Its process ends once functions of `atexit` have run, which is 0.02 s before Python has taken
    all modules apart."""
    code = [1]
    atexit.register(lambda: os._exit(flush(code[0])))  # called last, since it is registered first
    try:
        code[0] = _main()
    except SystemExit as end:  # click has printed completions, or a plug-in ends the program
        code[0] = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise  # Python prints a code that is text
    sys.exit(code[0])


def main() -> None:
    """The command in a process that goes on. Raises `SystemExit` with the exit code."""
    code = _main()
    gc.freeze()  # skips the last garbage collection, which takes 0.1 s
    sys.exit(code)


def _main() -> int:
    """Run the command line of the process. An error is reported as one line and an exit code, never as a traceback."""
    gc.set_threshold(500_000, 50)  # a command ends before garbage collection pays
    # The matrices are small. Threads of BLAS that wait for more would take the cores that simulate. Not `os.environ`,
    # which the programs that a command starts get: they keep as many threads as they like.
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        os.putenv("OPENBLAS_NUM_THREADS", "1")
    try:
        prepare()
        code = run(sys.argv[1:], started=STARTED)
    except KeyboardInterrupt:  # before or after the command, or a second Ctrl-C
        code = 130
    return last_words(code)


def run(arguments: list[str], *, started: float | None = None) -> int:
    """Run the command line. Return the exit code: 0 ok, 1 internal, 2 input, 3 could not be done, 130 interrupted.
    `started`: `time.monotonic()` when the user started the command. None means now."""
    as_json, out = "--json" in arguments, sys.stdout

    def failed(error: BaseException, code: int, message: str = "") -> int:
        return fail(error, code, message=message, as_json=as_json)

    try:
        began_s = time.monotonic() if started is None else started
        result = cli.main(arguments, prog_name="packer", standalone_mode=False, obj=began_s)
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        return failed(error, 130, message="interrupted")
    except click.exceptions.Exit as error:
        return error.exit_code
    except PackerError as error:
        return failed(error, error.exit_code)
    except BrokenPipeError:
        return 0
    except click.ClickException as error:
        return failed(error, 2)
    except OSError as error:  # a full disk or stream, a missing permission
        return failed(error, 2, message=_of_plugin(error))
    except MemoryError as error:
        return failed(error, 2, message="not enough memory")
    except BaseException as error:  # a plug-in may raise anything
        # click exits after it printed completions, and, with wrapped streams, if the reader of a pipe is gone.
        ended = isinstance(error, SystemExit)
        if ended and sys.stdout is not out:
            return 0
        if (ended and COMPLETION in os.environ) or os.environ.get("PACKER_DEBUG"):
            raise
        return failed(error, *_blamed(error))
    return result if isinstance(result, int) else 0


def _of_plugin(error: BaseException) -> str:
    """Message that names the plug-in that raised the error; "" if none did."""
    from packer.registry import plugin_behind

    plugin = plugin_behind(error)
    return f"{plugin} {raised(error)}." if plugin is not None else ""


def _blamed(error: BaseException) -> tuple[int, str]:
    """Exit code and message of an unexpected error."""
    from packer.registry import named, plugins_in_use

    if message := _of_plugin(error):
        return 2, message
    kind, where = type(error).__name__, error.__traceback__
    while where is not None:
        if where.tb_frame.f_globals.get("__name__") in ("numba.core.config", "numba.np.ufunc.parallel"):
            return 2, f"Numba refuses its settings in the environment (NUMBA_…): {error}"
        where = where.tb_next
    fault = f"{kind}: {error} (PACKER_DEBUG=1 shows where)"
    if used := plugins_in_use():  # its return value may have caused the error
        return 2, f"{named(used)} may break its contract, which packer.testing checks: {fault}"
    return 1, f"internal error: {fault}"
