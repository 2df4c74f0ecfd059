"""What holds for every test."""

import os
from pathlib import Path

# Before torch is imported: on a busy machine, compute threads that spin make a test take minutes; see engine/client.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Without a GPU, Triton's kernels run in its interpreter. Read when Triton is first imported, by whichever test that is.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"
