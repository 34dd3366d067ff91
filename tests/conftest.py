"""What every test relies on, set before anything imports torch or triton.

Subprocesses that tests start inherit it. Markers and time limits are in pyproject.toml.
"""

from __future__ import annotations

import os

# One thread a process: on two shared cores, two threads made one step 16 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing is fetched in a test: a model that is not in the repository must fail at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Neither Ray nor vLLM reports its usage to anybody from a test.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
if not os.path.exists("/dev/nvidiactl"):
    # Triton reads this when it is first imported, by whichever test that is. Without a GPU its
    # kernels run in the interpreter alone; with one, the tests run the compiled kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")
