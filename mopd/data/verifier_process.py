"""A user's verifier in a process of its own: a deadline, bounded memory, no network, no secrets.

What comes back from it is JSON, checked here: code that nobody has read must not be able to send
objects that this process would then build (pickle would run what they say).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from mopd.config.schema import DomainConfig
from mopd.data.confinement import allowed_environment, confine, end_with_parent
from mopd.data.verifiers import VerifierError, as_verdict, build_verifier
from mopd.errors import ConfigError
from mopd.types import Prompt, Verdict

START_S = 60.0
"""What importing a verifier may take, on top of its own timeout; seconds."""
_LARGEST = 1 << 20  # bytes of an answer


class NoVerdict(VerifierError):
    """The verifier's process has ended or did not answer in time: asking on is of no use.

    `cause` is the short text, the same for every answer, by which such failures are counted.
    """

    def __init__(self, text: str, cause: str) -> None:
        super().__init__(text)
        self.cause = cause


class VerifierProcess:
    """One domain's verifier; (prompt, answer) -> `Verdict`, and a context."""

    def __init__(self, domain: str, config: DomainConfig) -> None:
        """Start it. ConfigError (naming the domain) if the verifier cannot be built there."""
        assert config.verifier is not None
        self._where = f"domains.{domain}.verifier"
        self._limit_s = config.verifier.timeout_s
        self._asked = 0
        self._pipe, theirs = Pipe()
        environment = dict(os.environ)
        if config.verifier.target is not None:
            environment = allowed_environment(self._where, config.verifier.env)
        root = str(Path(__file__).resolve().parents[2])  # found from any working directory
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mopd.data.verifier_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Unbuffered: what it printed is to be read also where it is killed.
                env=environment | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # so that what it starts can be ended with it
            )
        try:
            said = self._ask((domain, config), START_S + self._limit_s, "while being imported")
            if said.get("fault"):
                raise ConfigError(str(said["fault"]))
        except NoVerdict as error:
            self.close()
            raise ConfigError(f"{self._where}: {error}") from None
        except BaseException:
            self.close()
            raise

    def __call__(self, prompt: Prompt, answer: str) -> Verdict:
        """Raises VerifierError with what the verifier raised, NoVerdict if it gave no answer."""
        said = self._ask((prompt, answer), self._limit_s, f"for {prompt.id}, answer {answer!r}")
        if said.get("raised") is not None:
            raise VerifierError(str(said["raised"]))
        correct, score = said.get("correct"), said.get("score")
        if not isinstance(correct, bool) or not isinstance(score, int | float):
            raise VerifierError(
                f"{self._where}: its process answered {said!r}, which is no verdict"
            )
        return as_verdict(Verdict(correct, float(score)), self._where)

    def _ask(self, message: object, limit_s: float, doing: str) -> dict[str, Any]:
        self._asked += 1
        try:
            self._pipe.send((self._asked, message))
            if not self._pipe.poll(limit_s):
                raise NoVerdict(
                    f"it gave no answer {doing} within {limit_s:g} s; raise {self._where}.timeout_s"
                    f" ({self._limit_s:g}) if it needs longer",
                    f"no verdict after {limit_s:g} s",
                )
            said = json.loads(self._pipe.recv_bytes(_LARGEST))
            if not isinstance(said, dict) or said.get("number") != self._asked:
                raise ValueError(said)
            return said
        except (EOFError, ConnectionError):
            try:
                code = self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:  # it has closed the pipe, and lives
                text = f"it closed its pipe to mopd {doing}"
            else:
                text = f"its process ended {doing} (exit code {code})"
            raise NoVerdict(text, "its process ended while judging") from None
        except (OSError, ValueError) as error:
            raise NoVerdict(
                f"something that is no verdict came from its process {doing}: {error}"[:300],
                "its process answered with no verdict",
            ) from None

    def close(self) -> None:
        """End it and everything it started."""
        self._pipe.close()
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def __enter__(self) -> VerifierProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LastingVerifier:
    """A `VerifierProcess` that is started anew, when it is next asked, after one that gave none."""

    def __init__(self, domain: str, config: DomainConfig) -> None:
        self._what = (domain, config)
        self._process: VerifierProcess | None = VerifierProcess(domain, config)

    def __call__(self, prompt: Prompt, answer: str) -> Verdict:
        if self._process is None:
            self._process = VerifierProcess(*self._what)
        try:
            return self._process(prompt, answer)
        except NoVerdict:
            self._process.close()
            self._process = None
            raise


def named(error: BaseException) -> str:
    """What a verifier raised, in words."""
    return str(error) if isinstance(error, VerifierError) else f"{type(error).__name__}: {error}"


def _serve(pipe: Connection) -> None:
    """The child: builds one verifier, then answers (prompt, answer) until the pipe closes."""

    def say(number: int, **what: object) -> None:
        pipe.send_bytes(json.dumps({"number": number, **what}).encode())

    end_with_parent()
    number, (domain, config) = pipe.recv()
    limits = config.verifier
    try:
        if limits.target is not None:
            confine(f"domains.{domain}.verifier", limits.memory_gib, limits.network)
        verifier = build_verifier(limits, domain, config.prompts)
        assert verifier is not None
    except ConfigError as error:
        say(number, fault=str(error))
        return
    say(number)
    while True:
        try:
            number, (prompt, answer) = pipe.recv()
        except EOFError:
            return
        try:
            verdict = verifier(prompt, answer)
        except (Exception, SystemExit) as error:  # sys.exit() in it must not look like an end
            say(number, raised=named(error))
        else:
            say(number, correct=verdict.correct, score=verdict.score)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
