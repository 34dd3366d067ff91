"""Where set-up takes torch from: real pip, a real environment, tiny wheels named torch."""

from __future__ import annotations

import os
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest

import setup_env

ROOT = Path(__file__).resolve().parents[2]


def make_wheel(folder: Path, name: str, version: str) -> None:
    """The smallest wheel that pip installs."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", f"__version__ = {version!r}\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_torch_is_taken_from_where_it_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real pip, tiny wheels: the machine's own offer, then the variable, then the default index;
    a CUDA build (no local version) is never taken."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv(setup_env.TORCH_INDEX_VARIABLE, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    registry, offered, index = tmp_path / "registry", tmp_path / "offered", tmp_path / "index"
    make_wheel(registry / "torch", "torch", "2.13.0")  # what the plain registry has
    make_wheel(offered, "torch", "2.13.0+cpu")
    make_wheel(index / "torch", "torch", "2.13.0+cpu")
    for folder in (registry, index):
        files = "".join(f'<a href="{p.name}">{p.name}</a>' for p in (folder / "torch").iterdir())
        (folder / "torch" / "index.html").write_text(f"<!DOCTYPE html><html>{files}</html>")
    monkeypatch.setenv("PIP_INDEX_URL", registry.as_uri())
    monkeypatch.setattr(setup_env, "TORCH_INDEX", (tmp_path / "nothing").as_uri())

    environment = tmp_path / "env"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    profile = setup_env.Profile("env", "a", str(ROOT / "requirements/torch-cpu.txt"), False, (), 0)
    log = tmp_path / "log"

    def installed() -> str:
        code = "import importlib.metadata as m; print(m.version('torch'))"
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
        pip = [str(python), "-m", "pip", "uninstall", "--yes", "--quiet", "torch"]
        subprocess.run(pip, check=True, capture_output=True)
        return done.stdout.strip()

    with pytest.raises(setup_env.SetupError) as caught:
        setup_env.install_torch(python, profile, log)
    assert setup_env.TORCH_INDEX_VARIABLE in str(caught.value)
    assert str(caught.value).count(setup_env.TORCH_INDEX) == 1

    monkeypatch.setattr(setup_env, "TORCH_INDEX", index.as_uri())
    setup_env.install_torch(python, profile, log)
    assert installed() == "2.13.0+cpu"

    monkeypatch.setattr(setup_env, "TORCH_INDEX", (tmp_path / "nothing").as_uri())
    monkeypatch.setenv("MOPD_TORCH_INDEX", index.as_uri())
    setup_env.install_torch(python, profile, log)
    assert installed() == "2.13.0+cpu"

    monkeypatch.delenv("MOPD_TORCH_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", str(offered))
    setup_env.install_torch(python, profile, log)
    assert installed() == "2.13.0+cpu"
