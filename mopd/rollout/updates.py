"""What an engine does with new weights before it says what it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mopd.errors import WeightSyncError
from mopd.protocols import Sequences
from mopd.rollout.manifest import Manifest, file_header, file_manifest, require_same_tensors


class WeightUpdates:
    """Loads files into vLLM's workers, or takes what vLLM's weight transfer brings them."""

    def __init__(
        self, llm: Any, expected: Manifest, say: Callable[[Sequences], list[list[float]]]
    ) -> None:
        """`llm`: vLLM's, with our worker extension. `expected`: of every update. `say`: the
        engine's logprobs, of nothing that it has kept."""
        self._llm, self._expected, self._say = llm, expected, say
        self._header = b""
        self._seen_twice = b""
        self._direct = b""

    @property
    def direct(self) -> bool:
        """Whether the last update was copied straight to its places."""
        return bool(self._header) and self._direct == self._header

    # -- files --------------------------------------------------------------------------------

    def check(self, path: Path, what: str) -> None:
        """Before `load`: WeightSyncError for a file that is not here, or not of this model."""
        if not path.is_file():
            raise WeightSyncError(
                f"{what}: there is no {path} where this engine runs. "
                "weight_sync.transport=shared_memory wants ranks and engines on one machine; file "
                "takes a weight_sync.directory that all machines see."
            )
        header = file_header(path)
        if header != self._header:  # equal headers: equal names, shapes and types
            require_same_tensors(file_manifest(path), self._expected, what)

    def load(self, path: Path, probe: Sequences) -> list[dict[str, int]]:
        """Per worker process, the fingerprints of what it holds now. `check` it first.

        Who sends tensors of the same header a second time will send them many times: their places
        are then learned, if the engine says exactly the same of the probe in both ways.
        """
        header = file_header(path)
        again, self._header = header == self._header, header
        if again and probe and header != self._seen_twice:
            self._seen_twice = header
            self._direct = header if self._learn(path, probe) else b""
        return self._load(path)

    def _load(self, path: Path) -> list[dict[str, int]]:
        return self._llm.collective_rpc("mopd_load_weights", args=(str(path),))  # type: ignore[no-any-return]

    def _learn(self, path: Path, probe: Sequences) -> bool:
        """Have updates copied straight to their places from now on (`mopd.rollout.direct_load`)."""
        said: list[object] = []
        if all(self._llm.collective_rpc("mopd_learn_places", args=(str(path),))):
            for direct in (True, False):  # first over the counters that learning has left behind
                self._llm.collective_rpc("mopd_set_direct", args=(direct,))
                self._load(path)
                said.append(self._say(probe))
        equal = bool(said) and said[0] == said[1]
        self._llm.collective_rpc("mopd_set_direct", args=(equal,))
        return equal

    # -- vLLM's weight transfer ---------------------------------------------------------------

    def transfer(self, method: str, info: dict[str, Any] | None) -> None:
        """See `RolloutEngine.transfer`."""
        if method == "start_weight_update":
            self._header = b""
            self._llm.collective_rpc("mopd_watch_loading")
        elif method == "update_weights":
            assert info is not None
            shapes = {n: tuple(s) for n, s in zip(info["names"], info["shapes"], strict=True)}
            # Buckets: what is not in this one comes in another, or is missed at the end.
            expected = {n: s for n, s in self._expected.items() if n in shapes}
            require_same_tensors(shapes, expected, "a bucket of new weights")
        self._llm.collective_rpc(method, args=() if info is None else (info,))

    def arrived(self) -> list[dict[str, int]]:
        """Per worker process, the fingerprints of what the last transfer brought; all of it."""
        held: list[dict[str, int]] = self._llm.collective_rpc("mopd_arrived")
        for sums in held:
            missing = sorted(self._expected.keys() - sums.keys())
            if missing:
                raise WeightSyncError(
                    f"{len(missing)} of {len(self._expected)} tensors never came: "
                    f"{', '.join(missing[:20])}"
                )
        return held
