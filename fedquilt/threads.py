"""How numeric libraries use threads here.

Idle threads that spin take the cores from those that work, ten times over where agents share a host; numpy's products
are small here. Libraries read these variables as they load, hence they are set before that, or for a new process.
"""

from typing import Final

QUIET: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
