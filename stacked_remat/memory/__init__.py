"""The memory, FLOPs and transfers of a program on any accelerator, found without
running it.

```python
from stacked_remat import memory

report = memory.report(
    train_step, model, optimizer_state, batch, donate="all", target="h200"
)
print(report)
```
"""

from .._places import PlaceError as PlaceError
from ._call import DoesNotFit as DoesNotFit, report as report
from ._compiled_text import Buffer as Buffer
from ._flops import Flops as Flops, count_flops as count_flops
from ._frontier import Frontier as Frontier, frontier as frontier
from ._plan import (
    CANDIDATES as CANDIDATES,
    BudgetError as BudgetError,
    Plan as Plan,
    compare as compare,
    parse_bytes as parse_bytes,
    plan as plan,
)
from ._report import (
    Comparison as Comparison,
    HostBytes as HostBytes,
    MemoryReport as MemoryReport,
    TimeBound as TimeBound,
    Trial as Trial,
)
from ._table import readable_bytes as readable_bytes
from ._targets import (
    TARGETS as TARGETS,
    CudaTarget as CudaTarget,
    LocalTarget as LocalTarget,
    Target as Target,
    TargetError as TargetError,
    TpuTarget as TpuTarget,
    find_target as find_target,
    target_of_device as target_of_device,
)
