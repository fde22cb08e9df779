"""Whatever the standard streams are, a command ends with a known exit code and without a traceback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from packer import registry
from packer.cli import run
from packer.cli.streams import plain_json

PACKER = "import sys; from packer.cli import command; sys.argv[0] = 'packer'; command()"


def shell(line: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A line of shell in which `packer` is the program of this checkout."""
    program = f'packer() {{ "{sys.executable}" -c "{PACKER}" "$@"; }}\n'
    return subprocess.run(
        ["sh", "-c", program + line],
        cwd=cwd,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PACKER_CONFIG": "", **environment},
    )


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("packer profiles list >&-", 0, b""),
        ("packer profiles list >&- 2>&-", 0, b""),
        ("packer profiles list --json >/dev/full", 2, b"No space left"),
        ("packer --version >/dev/full", 2, b"No space left"),
        ("packer profiles show none 2>/dev/full", 2, b""),
        ("packer profiles show none 2>&-", 2, b""),
        ("{ packer profiles list; echo exit $? >&2; } | true", 0, b"exit 0"),
        ("{ packer profiles list --json; echo exit $? >&2; } | true", 0, b"exit 0"),
        ("packer solve \"$(printf 'f\\377.csv')\"", 2, b"f\\udcff.csv: there is no such file"),
    ],
)
def test_closed_and_full_streams(tmp_path: Path, line: str, code: int, says: bytes) -> None:
    """A closed stream is silence; one that takes nothing is an error; a name of bytes is shown escaped."""
    done = shell(line, tmp_path)
    assert done.returncode == code
    assert says in done.stderr
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


def test_what_libraries_write_is_no_output(tmp_path: Path) -> None:
    """A line that a library writes to standard output by itself, past Python, does not end up in JSON."""
    program = (
        "import os, sys, packer.cli as cli\n"
        "run, sys.argv = cli.run, ['packer', 'profiles', 'list', '--json']\n"
        "cli.run = lambda *given, **options: os.write(1, b'by itself') and run(*given, **options)\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"by itself")
    assert json.loads(done.stdout)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("3", 3, ""), ("sys.exit()", 0, ""), ("sys.exit(5)", 5, ""), ("sys.exit('no')", 1, "no\n")],
)
def test_what_libraries_do_at_the_end_of_a_process_is_done(tmp_path: Path, end: str, code: int, said: str) -> None:
    """The process ends early, with the exit code of the command or of a plug-in that ends it, but not before functions
    of `atexit` have run."""
    program = (
        "import atexit, sys, packer.cli as cli\n"
        f"cli.run = lambda *given, **options: atexit.register(print, 'cleared') and {end}\n"
        "cli.command()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"cleared\n", said.encode())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminals_without_utf_8(tmp_path: Path, encoding: str) -> None:
    """What the encoding lacks is escaped; JSON stays JSON with the same content."""
    (tmp_path / "f.csv").write_text("adapter,rank,rate\n名前é\U0001f984,8,0.1\n", "utf-8")
    done = shell("packer workload describe f.csv && packer memory --max-loras 8 --max-lora-rank 8",
                 tmp_path, PYTHONIOENCODING=encoding)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    done = shell("packer workload describe f.csv --json", tmp_path, PYTHONIOENCODING=encoding)
    plain = shell("packer workload describe f.csv --json", tmp_path, PYTHONIOENCODING="utf-8")
    assert json.loads(done.stdout.decode(encoding)) == json.loads(plain.stdout.decode("utf-8"))


@pytest.mark.parametrize(
    ("words", "about"),
    [
        ("profiles show none --json", {"type": "UnknownNameError"}),
        ("workload describe f.csv --json", {"type": "FileFormatError", "row": 2, "column": "rank"}),
        ("workload describe --json", {"type": "MissingParameter"}),
    ],
)
def test_errors_are_json_where_results_are(
    words: str, about: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A script that reads JSON from standard output finds the error there, with its place."""
    monkeypatch.chdir(tmp_path)
    Path("f.csv").write_text("adapter,rank,rate\na,x,1\n")
    assert run(words.split()) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert error["message"].strip() in err
    assert error["exit_code"] == 2
    assert about.items() <= error.items()


def test_sigterm_leaves_no_temporary_file(tmp_path: Path) -> None:
    """A command that is ended while it writes removes what it had begun, and the old result stays."""
    (tmp_path / "out").write_text("old")
    code = (
        "import os, sys, click, packer.cli as c\n"
        "from packer.io.files import atomic_path\n"
        "@click.command()\n"
        "def write():\n"
        "    with atomic_path('out') as path:\n"
        "        path.write_text('half'); print('ready', flush=True); __import__('time').sleep(60)\n"
        "c.cli.lazy['write'] = ''; c.cli.load = lambda name: write\n"
        "sys.argv = ['packer', 'write']; c.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert len(list(tmp_path.iterdir())) == 2
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.strip() == b"packer: interrupted"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "old"


def test_an_interrupt_in_a_callback_is_not_lost() -> None:
    """Where compiled code can't raise it, Python would print a traceback and go on."""
    code = (
        "import time\n"
        "from packer.cli.streams import prepare\n"
        "class Callback:\n"
        "    def __del__(self): raise KeyboardInterrupt\n"
        "prepare()\n"
        "try:\n"
        "    Callback()\n"
        "    time.sleep(20)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\n", "", 0)


@pytest.mark.parametrize("module", ["click", "packer.cli.declare", "packer.cli.streams", "packer.cli.memory"])
def test_ctrl_c_while_modules_are_imported_is_no_traceback(module: str) -> None:
    """Ctrl-C before a command begins ends it as one during the command: exit code 130, at most a line."""
    program = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    @staticmethod\n"
        "    def find_spec(name, *_):\n"
        f"        if name == '{module}': os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Interrupt)\n"
        "from packer.cli import main\n"
        "sys.argv = ['packer', 'memory', '--help']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr.strip() in (b"", b"packer: interrupted")


def test_what_a_file_or_server_says_does_not_reach_the_terminal_raw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A header sets no title, in messages and in JSON; a value of thousands of signs is cut."""
    monkeypatch.chdir(tmp_path)
    Path("f.csv").write_text("a\x1b]0;x\x07b\x9b31m,rank\n1,2\n", "utf-8")
    for words in (["solve", "f.csv"], ["solve", "f.csv", "--json"], ["solve", "\x1b[2Jx"], ["\x1b[2Jx"]):
        assert run(words) == 2
        out, err = capsys.readouterr()
        assert not set(out + err) & {"\x1b", "\x07", "\x9b"}
        assert err.startswith(("packer: ", "Usage: "))
    Path("f.csv").write_text(f"adapter,rank,rate\na,{'9' * 5000}x,1\n")
    assert run(["solve", "f.csv"]) == 2
    assert max(map(len, capsys.readouterr().err.split())) <= 201


def test_json_has_nothing_that_a_terminal_acts_on() -> None:
    """The same data, without the control and direction signs that JSON allows."""
    text = json.dumps({"a": "\x9b2J\u202e\x7fé\u2066"}, ensure_ascii=False)
    shown = plain_json(text)
    assert shown == '{"a": "\\u009b2J\\u202e\\u007fé\\u2066"}'
    assert json.loads(shown) == json.loads(text)


PLUGIN = """
import sys
print("loaded")

class Mine:
    name = "mine"
    def supports(self, *_): return None
    def solve(self, *_args, **_more):
        print("noise")
        {body}
"""


@pytest.mark.parametrize(
    ("body", "what"),
    [("sys.exit(0)", "ended the program by sys.exit"),
     ("raise RuntimeError('\\x1b[2Jno')", r"raised RuntimeError: \\x1b\[2Jno"),
     ("raise GeneratorExit('no')", "raised GeneratorExit: no"),
     ("return None", "")],
)  # fmt: skip
def test_a_plug_in_that_fails_is_named_with_its_file(tmp_path: Path, body: str, what: str) -> None:
    """Exit code 2 whatever it does; what it prints does not stand among the results."""
    (tmp_path / "strange_plugin.py").write_text(PLUGIN.replace("{body}", body))
    info = tmp_path / "strange-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[packer.solvers]\nmine = strange_plugin:Mine\n")
    (tmp_path / "f.csv").write_text("adapter,rank,rate\na,8,1\n")
    done = subprocess.run(
        [sys.executable, "-c", "from packer.cli import main; main()", "solve", "f.csv", "--objective", "gpus",
         "--solver", "mine", "--json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    error = json.loads(done.stdout)["error"]
    where = rf"[Tt]he solver 'mine' \(strange_plugin:Mine\) {what} \(.*strange_plugin.py, line 10\)"
    assert re.search(where if what else "Expected a Solution of Mine.solve, got None", error["message"])
    assert error["message"] in done.stderr
    assert "noise" in done.stderr


@pytest.mark.parametrize("line", ["workload describe", "show", "profiles show", "evaluate"])
def test_an_address_in_place_of_a_file_shows_no_login(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the message nor as the path of the file that is not there."""
    assert run([*line.split(), "http://me:secret@host/x?key=secret", "--json"]) == 2
    found = capsys.readouterr()
    assert "***@host" in found.err
    assert "***@host" in found.out
    assert "secret" not in found.out + found.err


OTHERS = """
import sys
from packer.objectives.gpus import Gpus
from packer.predictors.twin import TwinPredictor
from packer.twin.tuning.policies.chunked import Chunked

def of(act):
    if act == "nothing": return None
    if act == "text": return "x"
    if act == "full": raise OSError(28, "No space left on device")
    sys.exit(0)

class Aim(Gpus):
    name = "mine"
    def key(self, *_): return of({act!r})

class Oracle(TwinPredictor):
    name = "mine"
    def evaluate(self, *_): return of({act!r})

class Trainer(Chunked):
    name = "mine"
    def parameters(self, *_): return of({act!r})
"""


@pytest.mark.parametrize("act", ["nothing", "text", "full", "exits"])
@pytest.mark.parametrize(
    ("who", "line"),
    [
        ("objective 'mine' (others:Aim)", "solve f.csv --objective mine --predictor tree"),
        ("predictor 'mine' (others:Oracle)", "evaluate plan.json --predictor mine"),
        ("tuning policy 'mine' (others:Trainer)", "simulate f.csv --max-loras 1 --duration 5 --tuning mine"),
    ],
)
def test_each_kind_of_plug_in_is_named_whatever_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], act: str, who: str, line: str
) -> None:
    """One of several of a package; also where it raises nothing, but what it returns can't be used."""
    (tmp_path / "others.py").write_text(OTHERS.replace("{act!r}", repr(act)))
    (tmp_path / "others-1.0.dist-info").mkdir()
    (tmp_path / "others-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1\n")
    groups = {"objectives": "Aim", "predictors": "Oracle", "tuning": "Trainer"}
    entries = "".join(f"[packer.{group}]\nmine = others:{each}\n" for group, each in groups.items())
    (tmp_path / "others-1.0.dist-info" / "entry_points.txt").write_text(entries)
    (tmp_path / "f.csv").write_text("adapter,rank,rate\na,8,0.1\n")
    monkeypatch.chdir(tmp_path)
    assert run([*["solve", "f.csv", "--objective", "gpus", "--predictor", "tree", "-o", "plan.json", "-q"]]) == 0
    monkeypatch.syspath_prepend(tmp_path)
    registry._entries.cache_clear()
    try:
        assert run([*line.split(), "--json"]) == 2
        assert f"he {who}" in json.loads(capsys.readouterr().out)["error"]["message"]
    finally:
        monkeypatch.undo()
        registry._entries.cache_clear()
        sys.modules.pop("others", None)


@pytest.mark.parametrize("value", ["0", "-3"])
def test_settings_that_numba_refuses_are_bad_input(value: str, tmp_path: Path) -> None:
    """Exit code 2, and the message names the environment."""
    (tmp_path / "f.csv").write_text("adapter,rank,rate\na,8,1\n")
    done = shell("packer simulate f.csv --max-loras 1 --duration 5", tmp_path, NUMBA_NUM_THREADS=value)
    assert done.returncode == 2
    assert done.stderr.startswith(b"packer: Numba refuses its settings in the environment")


def test_a_warning_with_a_traceback_is_one_line() -> None:
    """Numba warns of a setting that is no number with the traceback of its own error."""
    program = "import warnings; from packer.cli.streams import prepare; prepare(); warnings.warn('a\\nTraceback b')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "packer: a\n")


def test_a_signal_while_python_ends_changes_nothing() -> None:
    """Python takes its handlers back when all that was to run at the exit has run: the signals are ignored then."""
    program = (
        "import atexit, os, signal, sys\n"
        "numbers = (signal.SIGINT, signal.SIGTERM)\n"
        "atexit.register(lambda: [os.write(2, signal.getsignal(each).name.encode()) for each in numbers])\n"
        "import packer.cli as c\n"
        "sys.argv = ['packer', 'systems']\n"
        "c.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"SIG_IGNSIG_IGN")


def test_ctrl_c_while_a_command_ends_changes_nothing() -> None:
    """One that comes while results are written is too late; the exit code is that of the command."""
    program = (
        "import os, signal, sys\n"
        "import packer.cli as c, packer.cli.streams as s\n"
        "before = s.flush\n"
        "def flush(code):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return before(code)\n"
        "s.flush = flush\n"
        "sys.argv = ['packer', 'systems']\n"
        "c.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout
