"""Ask the installed engine whether it would take a command line, without starting it.

The environment's own Python runs the release's own parser (`add_cli_args` and `parse_args`, which is right for every
release: up to 0.5.18 the step after it wants a GPU). On the engines that need no GPU, its argument resolution follows.
A refusal costs seconds here and nobody's service; after the switch it costs both.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from . import profile_checks, profile_table, release_options, releases, venvs

#: Seconds for the import of the engine, slow disks included (3 to 15 on a CPU).
LIMIT = 300

MARK = "dflash-fleet-parser "

# An option as a parser names it, or the field of one as a resolution does.
_NAMED = re.compile(r"--([a-z0-9][a-z0-9-]*)|\b([a-z]+(?:_[a-z0-9]+)+)\b")

# Runs inside the environment. Answers with one marked line, whatever else the engine prints.
PROGRAM = r"""
import argparse, contextlib, io, json, os, sys

given = json.load(sys.stdin)
argv, resolve = given["arguments"], given["resolve"]
said = io.StringIO()


def answer(**found):
    sys.__stdout__.write("\n" + given["mark"] + json.dumps(found) + "\n")
    sys.__stdout__.flush()
    os._exit(0)  # an engine's own exit handlers have nothing to add


def last(text):
    return ([line.strip() for line in text.splitlines() if line.strip()] or [""])[-1]


def stands_in():
    from sglang._rehearsal import server_args
    args, merged = server_args.parse(argv)
    if resolve and os.path.isdir(args.model_path):
        server_args.resolve(args, merged)


def real():
    from sglang.srt.server_args import ServerArgs
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    words = argv
    if "--config" in argv:
        try:
            from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
        except ImportError:
            from sglang.srt.server_args_config_parser import ConfigArgumentMerger
        words = ConfigArgumentMerger(parser).merge_config_with_args(argv)
    args = parser.parse_args(words)
    if resolve and hasattr(ServerArgs, "resolve_once") and os.path.isdir(args.model_path):
        ServerArgs.from_cli_args(args).resolve_once()


try:
    import sglang
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        stand_in = os.path.isdir(os.path.join(sglang.__path__[0], "_rehearsal"))
        stands_in() if stand_in else real()
except SystemExit as end:
    if end.code not in (None, 0):
        answer(ok=False, message=last(said.getvalue()) or "exit status %s" % end.code)
except BaseException as error:
    error = getattr(error, "error", error)
    answer(ok=False, message="%s: %s" % (type(error).__name__, last(str(error))))
answer(ok=True, message="")
"""


def ask(
    python: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    user: str = "",
    resolve: bool = False,
    limit: float = LIMIT,
) -> str:
    """Empty where the engine of this environment takes the arguments, else the last line of what it says.

    Runs as the engine's user with the unit's variables; `resolve` also runs the resolution of arguments, for engines
    that need no GPU for it.
    """
    with tempfile.TemporaryDirectory(prefix="dflash-fleet-") as home:
        own = {"HOME": home, "TMPDIR": home, "XDG_CACHE_HOME": home, "SGLANG_CACHE_DIR": home}
        given = {str(name): str(value) for name, value in environment.items()}
        try:
            done = subprocess.run(
                [python, "-c", PROGRAM],
                input=json.dumps({"arguments": list(arguments), "resolve": resolve, "mark": MARK}),
                env=venvs.clean_environment({**given, **own, "PYTHONDONTWRITEBYTECODE": "1"}),
                cwd=home,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
                **venvs.run_as(user, home),
            )
        except subprocess.TimeoutExpired:
            return f"its parser did not answer within {limit:.0f} s"
        except OSError as error:
            return f"{python}: {error.strerror}"
    return verdict(done.stdout, done.stderr, done.returncode)


def verdict(stdout: str, stderr: str, status: int) -> str:
    """The answer in the program's output; a program that died without one is a refusal too."""
    for line in reversed(stdout.splitlines()):
        if line.startswith(MARK):
            answer: dict[str, Any] = json.loads(line[len(MARK) :])
            return "" if answer["ok"] else str(answer["message"])
    said = [line.strip() for line in (stdout + "\n" + stderr).splitlines() if line.strip()]
    return f"its parser ended with status {status}: {said[-1] if said else 'no output'}"


def variable_for(message: str, arguments: Sequence[str] = ()) -> str:
    """The inventory's variable behind the option that a parser or a resolution names, or nothing.

    Of several the one decides that the command line holds: what an option is compared with stands in the message too.
    A parser names options, a resolution also their fields (tp_size). An option that no variable stands for was given as
    an extra argument, or by an own profile.
    """
    given = [word[2:].split("=")[0] for word in arguments if word.startswith("--")]
    named = [option or field.replace("_", "-") for option, field in _NAMED.findall(message)]
    named = [name for name in named if name in release_options.OPTIONS or name in profile_checks.OWNED]
    if not named:
        return profile_checks.FREE if "--" in message else ""
    option = next((name for name in named if any(releases.same_setting(name, other) for other in given)), named[0])
    return profile_checks.owner_of(option, _drafter(arguments)) or profile_checks.FREE


def _drafter(arguments: Sequence[str]) -> str:
    """Which drafter a command line asks for."""
    words = list(arguments)
    algorithm = words[words.index("--speculative-algorithm") + 1] if "--speculative-algorithm" in words else "DFLASH"
    rows = profile_table.DRAFTERS.items()
    return next((name for name, row in rows if row["algorithm"] == algorithm), "none")


def refusal(message: str, engine: Mapping[str, Any], arguments: Sequence[str] = ()) -> str:
    """What a person reads: who refuses, what to correct, and that nothing happened to what runs."""
    variable = variable_for(message, arguments)
    first = f"{variable}: " if variable else ""
    name = f"SGLang {engine.get('version')}" + (
        "" if engine.get("build") in (None, "cuda") else f" ({engine.get('build')})"
    )
    return (
        f"{first}{name} on this host refuses its command line, so nothing was switched and what runs goes on running: "
        f"{message}"
    )
