"""Thread settings of numeric libraries.

Idle threads that spin slow down the working ones, ten times where agents share a host; numpy's products
are small here. Libraries read these variables as they load, so they are set before, or for a new process.
"""

from typing import Final

QUIET: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
