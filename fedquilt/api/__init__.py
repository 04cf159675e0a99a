"""Public names of `import fedquilt`."""

from fedquilt.api.comparison import Comparison, compare
from fedquilt.api.job import Cohort, Data, Fleet, Job
from fedquilt.api.method_factory import method
from fedquilt.api.run import Run
from fedquilt.api.simulation import simulate
from fedquilt.api.table import Table

__all__ = ["Cohort", "Comparison", "Data", "Fleet", "Job", "Run", "Table", "compare", "method", "simulate"]
