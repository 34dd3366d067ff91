"""A Ray cluster that is not there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mopd.config.load import load_config
from mopd.errors import ConfigError
from mopd.runtime.cluster import LOOPBACK, ray_cluster
from mopd.runtime.ports import free_port

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("host", [LOOPBACK, "no-such-host.invalid"])
def test_an_address_where_nobody_listens_is_said_at_once(host: str) -> None:
    """Ray itself went on trying for more than four minutes."""
    config = load_config([ROOT / "configs/quickstart.yaml"])
    config.ray.address = f"{host}:{free_port(LOOPBACK)}"
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=f"no Ray cluster at '{host}:.*ray start --head"):  # noqa: SIM117
        with ray_cluster(config):
            pass
    assert time.monotonic() - begin < 60
