"""Compiles every Triton kernel for a Hopper GPU (sm_90), for which no GPU is needed.

A process of its own, because the tests' runs in Triton's interpreter. Prints one JSON object:
{kernel with its switches: [registers a thread, bytes spilled]}.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mopd.kernels import gathered_logprob, triton_buckets, triton_pairs
from mopd.kernels.triton_common import warps

ROWS, BUCKETS, PAIRS = (m.MAX_TILE for m in (gathered_logprob, triton_buckets, triton_pairs))
LOGITS = {"logits_ptr", "a_ptr", "b_ptr", "x_ptr", "y_ptr", "out_ptr"}
IDS = {"target_ptr", "local_ptr"}


def kernels():
    """(function, dtype of the logits, constants)."""
    for dtype in ("bf16", "fp16", "fp32"):
        for entropy in (False, True):
            for finish in (False, True):
                switches = {"ENTROPY": entropy, "FINISH": finish, "TEACHER": finish}
                constants = {"IGNORE_ID": -1, "TILE": ROWS} | switches
                yield gathered_logprob._forward_kernel, dtype, constants
            constants = {"ENTROPY": entropy, "SLOTS": 16, "TILE": BUCKETS}
            yield triton_buckets._tail_kernel, dtype, constants
            yield triton_pairs._pair_kernel, dtype, {"WEIGHTED": entropy, "TILE": PAIRS}
        yield gathered_logprob._backward_kernel, dtype, {"IGNORE_ID": -1, "TILE": ROWS}
        yield triton_buckets._bucket_gradient_kernel, dtype, {"SLOTS": 16, "TILE": BUCKETS}
        yield triton_pairs._jsd_kernel, dtype, {"TILE": PAIRS}
        for direction in (0, 1, 2):
            constants = {"DIRECTION": direction, "TILE": PAIRS}
            yield triton_pairs._pair_gradient_kernel, dtype, constants


def argument_type(name: str, dtype: str) -> str:
    if name in LOGITS:
        return f"*{dtype}"
    if name in IDS:
        return "*i64"
    if name == "live_ptr":
        return "*u8"
    if name.endswith("_ptr"):
        return "*fp32"
    return "fp32" if "temperature" in name or name == "beta" else "i32"


def resources(function, dtype: str, constants: dict) -> tuple[int, int]:
    """(registers a thread, bytes of spill stores) as ptxas tells them."""
    names = function.arg_names
    constants = constants | {n: 1 for n in names if n.endswith("stride_column")}
    types = {n: "constexpr" if n in constants else argument_type(n, dtype) for n in names}
    aligned = [
        (i,)
        for i, n in enumerate(names)
        if n.endswith(("_ptr", "stride_row")) or n in ("columns", "all_columns")
    ]
    source = ASTSource(
        function, types, constants, dict.fromkeys(aligned, [["tt.divisibility", 16]])
    )
    options = {"num_warps": warps(constants["TILE"])}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        done = subprocess.run(
            [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", ptx, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        )
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])
    return registers, int(re.search(r"(\d+) bytes spill stores", done.stderr)[1])


def main() -> None:
    found = {}
    for function, dtype, constants in kernels():
        switches = " ".join(f"{k}={int(v)}" for k, v in constants.items() if k != "IGNORE_ID")
        found[f"{function.__name__} {dtype} {switches}"] = resources(function, dtype, constants)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
