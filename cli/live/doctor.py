"""`packer live doctor`."""

from __future__ import annotations

from dataclasses import asdict

from packer.cli.declare import bundle, command, option
from packer.cli.options import Output
from packer.cli.output import Table


@bundle
class DoctorOptions:
    """Where vLLM is.

    python: Interpreter of vLLM's environment.
    url: A running server instead.
    api_key_env: Environment variable with its key, or a file of it as @FILE.
    """

    python: str | None = option(metavar="PATH")
    url: str | None = option(metavar="URL")
    api_key_env: str | None = option(metavar="NAME|@FILE")


@command
def doctor(given: DoctorOptions, out: Output) -> int:
    """Say which vLLM is installed and what is missing, with the command that installs it. Exit code 2 if anything is.

    \b
    Examples:
      packer live doctor
      packer live doctor --url http://gpu-7:8000
    """

    from packer.io.web import address_of, key_of
    from packer.live.environment import diagnose, diagnose_url

    if given.url is None:
        checks = diagnose(given.python)
    else:
        checks = diagnose_url(address_of(given.url, key_of(given.api_key_env)))
    ok = all(check.ok for check in checks)
    rows = [("ok" if c.ok else "MISSING", c.name, c.detail, c.fix) for c in checks]
    out.result(
        {"ok": ok, "checks": [asdict(check) for check in checks]},
        lambda: [Table(None, ("", "what", "found", "remedy"), rows, left=(0, 1, 2, 3))],
    )
    return 0 if ok else 2
