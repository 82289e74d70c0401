"""The memory, arithmetic and transfers of a program on any accelerator, found without running it.

```python
from stacked_remat import memory

print(memory.report(train_step, model, optimizer_state, batch, donate="all", target="h200"))
```
"""

from ._arguments import arguments_on_host
from ._call import report
from ._compiled_sizes import DoesNotFit
from ._costs import Flops
from ._flops import count_flops
from ._largest import Buffer
from ._plan import CANDIDATES, BudgetError, Comparison, Plan, compare, parse_bytes, plan
from ._report import HostBytes, MemoryReport, TimeBound
from ._search import Trial
from ._table import readable_bytes
from ._targets import (
    TARGETS,
    CudaTarget,
    LocalTarget,
    Target,
    TargetError,
    TpuTarget,
    find_target,
    target_mesh,
    target_of_device,
)

__all__ = [
    "CANDIDATES",
    "TARGETS",
    "BudgetError",
    "Buffer",
    "Comparison",
    "CudaTarget",
    "DoesNotFit",
    "Flops",
    "HostBytes",
    "LocalTarget",
    "MemoryReport",
    "Plan",
    "Target",
    "TargetError",
    "TimeBound",
    "TpuTarget",
    "Trial",
    "arguments_on_host",
    "compare",
    "count_flops",
    "find_target",
    "parse_bytes",
    "plan",
    "readable_bytes",
    "report",
    "target_mesh",
    "target_of_device",
]
